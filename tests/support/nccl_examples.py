"""Logs as NCCL writes them, built line by line: what each release says when it sets communicators up."""

from __future__ import annotations

from pathlib import Path

COMM_ID = "0x49bbd7790311d5eb"


def init_lines(host: str, process: int, rank: int, size: int, device: int, event: str, comm_id: str = COMM_ID) -> str:
    handle = f"0x{0x55D761DB2DF0 + rank + 4096 * int(comm_id[-2:], 16):x}"
    return (
        f"{host}:{process}:{process + 1} [{device}] NCCL INFO ncclCommInitRank comm {handle} rank {rank} nranks {size} "
        f"cudaDev {device} nvmlDev {device} busId {device + 1}1000 commId {comm_id} - Init {event}"
    )


def one_host(rank: int, via: str = "P2P/CUMEM/read", coll_channels: int = 2) -> list[str]:
    """NCCL 2.21, two ranks of one machine; the algorithm is a number, and rank 0 alone says it."""
    process = 23440 + rank
    said = f"node0:{process}:{process + 1} [{rank}] NCCL INFO"
    lines = [f"node0:{process}:{process} [{rank}] NCCL INFO cudaDriverVersion 12040"]
    lines += ["NCCL version 2.21.5+cuda12.4"] if rank == 0 else []
    lines += [
        f"{said} NCCL_IB_DISABLE set by environment to 1.",
        f"{said} NET/IB : No device found.",
        f"{said} NET/Socket : Using [0]eth0:10.0.0.1<0>",
        f"{said} Using network Socket",
        init_lines("node0", process, rank, 2, rank, "START"),
        f"{said} NVLS multicast support is not available on dev {rank}",
    ]
    lines += [f"{said} Channel {channel:02}/02 :    0   1" for channel in range(2)] if rank == 0 else []
    lines += [
        f"{said} P2P Chunksize set to 524288",
        *(
            f"{said} Channel {channel:02}/0 : {rank}[{rank}] -> {1 - rank}[{1 - rank}] via {via}"
            for channel in range(2)
        ),
        f"{said} Connected all rings",
        f"{said} {coll_channels} coll channels, 0 collnet channels, 0 nvls channels, 2 p2p channels, "
        "2 p2p channels per peer",
        init_lines("node0", process, rank, 2, rank, "COMPLETE"),
    ]
    if rank == 0:
        chosen = f"node0:{process}:{process} [0] NCCL INFO"
        lines += [f"{chosen} AllReduce: {size} Bytes -> Algo 1 proto {0 if size < 4096 else 2} time 25.2"
                  for size in (8, 1024, 26214400, 26214400)]  # fmt: skip
    return lines


def two_hosts(rank: int, via: str = "NET/IB/0/GDRDMA") -> list[str]:
    """NCCL 2.27, one rank on each of two machines; both ends of a connection tell of it, and algorithms have names."""
    host, process = f"gn-001{rank}", 981 + 10 * rank
    said = f"{host}:{process}:{process + 1} [0] NCCL INFO"
    other = 1 - rank
    lines = [f"{host}:{process}:{process} [0] NCCL INFO NCCL version 2.27.3+cuda12.9"]
    lines += [f"{said} Assigned NET plugin IB to comm", init_lines(host, process, rank, 2, 0, "START")]
    lines += [f"{said} NVLS multicast support is available on dev 0 (NVLS_NCHANNELS 16)"]
    for channel in range(4):
        lines += [
            f"{said} Channel {channel:02}/0 : {other}[0] -> {rank}[0] [receive] via {via} comm 0x55d761d nRanks 02",
            f"{said} Channel {channel:02}/0 : {rank}[0] -> {other}[0] [send] via {via} comm 0x55d761d nRanks 02",
        ]
    lines += [
        f"{said} Connected all rings, use ring PXN 0 GDR 1",
        f"{said} 4 coll channels, 4 collnet channels, 0 nvls channels, 4 p2p channels, 2 p2p channels per peer",
        init_lines(host, process, rank, 2, 0, "COMPLETE"),
    ]
    if rank == 0:
        for size, algorithm, protocol in (
            (4096, "TREE", "LL"),
            (8388608, "RING", "LL128"),
            (268435456, "NVLS", "SIMPLE"),
        ):
            lines.append(
                f"{said} AllReduce: {size} Bytes -> Algo {algorithm} proto {protocol} channel{{Lo..Hi}}={{0..3}}"
            )
        lines.append(f"{said} AllGather [Symmetric]: 65536 Bytes -> Kernel AllGather_LLMC nchannels 4 nthreads 512")
    return lines


def write_logs(folder: Path, logs: list[list[str]]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, lines in enumerate(logs):
        (folder / f"nccl_rank_host_{100 + number}.log").write_text("\n".join(lines) + "\n")
    return folder
