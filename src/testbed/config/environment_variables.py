"""Environment variables that runs record, or that change the timing of their steps. No torch.

A run with one of the latter is marked as instrumented.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from testbed.errors import InputError

# exported by scripts/slurm/evidence.sh: the names of its toggles that are on, and the folder of this start's evidence
EVIDENCE_TOGGLES, EVIDENCE_DIR = "EVIDENCE_TOGGLES", "EVIDENCE_DIR"
# The values with which each variable costs time. NCCL_DEBUG=WARN and VERSION write nothing while a run is well.
_COSTS_TIME = {
    "NCCL_DEBUG": ("INFO", "TRACE"),
    "TORCH_DISTRIBUTED_DEBUG": ("INFO", "DETAIL"),
    "TORCH_NCCL_DESYNC_DEBUG": ("1", "Y", "YES", "T", "TRUE", "ON"),
    "TORCH_NCCL_ENABLE_TIMING": ("1", "Y", "YES", "T", "TRUE", "ON"),
    "CUDA_LAUNCH_BLOCKING": ("1",),
}
_NSIGHT = "NSYS_PROFILING_SESSION_ID"  # set by nsys in what it runs


def instruments_in(environment: Mapping[str, Any]) -> list[str]:
    """Return the switched-on instruments as "NAME=value". Values may be of any type, as in a damaged file."""
    values = {name: str(environment.get(name) or "").upper() for name in _COSTS_TIME}
    found = [f"{name}={value}" for name, value in values.items() if value in _COSTS_TIME[name]]
    if environment.get(_NSIGHT):
        found.append("nsys")
    return found + [f"{toggle}=1" for toggle in str(environment.get(EVIDENCE_TOGGLES) or "").split()]


# They change how a run communicates or which devices it sees.
_RECORDED = frozenset(
    "CUDA_VISIBLE_DEVICES MASTER_ADDR MASTER_PORT OMP_NUM_THREADS OMP_WAIT_POLICY GOMP_SPINCOUNT "
    "GLOO_SOCKET_IFNAME".split()
)
_NCCL = frozenset(
    "NCCL_ALGO NCCL_BUFFSIZE NCCL_COLLNET_ENABLE NCCL_COLLNET_NODE_THRESHOLD NCCL_COMM_BLOCKING NCCL_CROSS_NIC "
    "NCCL_CTA_POLICY NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE NCCL_DEBUG NCCL_DEBUG_SUBSYS NCCL_DMABUF_ENABLE "
    "NCCL_GRAPH_MIXING_SUPPORT NCCL_GRAPH_REGISTER NCCL_IB_ADAPTIVE_ROUTING NCCL_IB_AR_THRESHOLD NCCL_IB_DISABLE "
    "NCCL_IB_GID_INDEX NCCL_IB_HCA NCCL_IB_MERGE_NICS NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_QPS_PER_CONNECTION "
    "NCCL_IB_RETRY_CNT NCCL_IB_SL NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_TC NCCL_IB_TIMEOUT NCCL_IGNORE_CPU_AFFINITY "
    "NCCL_LAUNCH_MODE NCCL_LOCAL_REGISTER NCCL_MAX_CTAS NCCL_MAX_NCHANNELS NCCL_MIN_CTAS NCCL_MIN_NCHANNELS "
    "NCCL_MNNVL_ENABLE NCCL_NET NCCL_NET_GDR_LEVEL NCCL_NET_GDR_READ NCCL_NET_PLUGIN NCCL_NET_SHARED_BUFFERS "
    "NCCL_NSOCKS_PERTHREAD NCCL_NTHREADS NCCL_NVB_DISABLE NCCL_NVLS_ENABLE NCCL_P2P_DIRECT_DISABLE NCCL_P2P_DISABLE "
    "NCCL_P2P_LEVEL NCCL_P2P_NET_CHUNKSIZE NCCL_PROTO NCCL_PXN_DISABLE NCCL_RUNTIME_CONNECT NCCL_SHM_DISABLE "
    "NCCL_SOCKET_FAMILY NCCL_SOCKET_IFNAME NCCL_SOCKET_NTHREADS NCCL_TOPO_FILE NCCL_TUNER_PLUGIN "
    "TORCH_FR_BUFFER_SIZE TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_BLOCKING_WAIT "
    "TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_DESYNC_DEBUG TORCH_NCCL_DUMP_ON_TIMEOUT TORCH_NCCL_ENABLE_MONITORING "
    "TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC TORCH_NCCL_HIGH_PRIORITY TORCH_NCCL_NAN_CHECK "
    "TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_NCCL_USE_COMM_NONBLOCKING".split()
)
# What Slurm says of a job: few of its many variables, since sites and users add their own, tokens among them.
_SLURM = {
    "job_id": "SLURM_JOB_ID",
    "job_name": "SLURM_JOB_NAME",
    "cluster": "SLURM_CLUSTER_NAME",
    "partition": "SLURM_JOB_PARTITION",
    "nodelist": "SLURM_JOB_NODELIST",
    "nnodes": "SLURM_NNODES",
    "ntasks": "SLURM_NTASKS",
    "restart_count": "SLURM_RESTART_COUNT",
    "procid": "SLURM_PROCID",
    "localid": "SLURM_LOCALID",
    "gpus": "SLURM_GPUS",
}
_NAMES_A_SECRET = re.compile(
    r"(?:^|_)(?:TOKEN|JWT|SECRET|CREDENTIALS?|(?:API|ACCESS|PRIVATE|SECRET)_?KEY)(?:_|$)"
    r"|(?:PASSWORD|PASSWD|PASSPHRASE)(?:_|$)|(?:^|_|SSH)PASS$|_(?:PWD|PAT)$"  # PGPASSWORD, MYSQL_PWD, GH_PAT
)
_TOGGLE = "NCCL_LOGS"  # of scripts/slurm/evidence.sh: no variable of NCCL's, whatever it is called
_SHORTEST_SECRET = 8  # a shorter value would be found in words that have nothing to do with it


def recorded_variables() -> dict[str, str]:
    """Return the variables of launcher and device that are set, by name."""
    return {name: value for name, value in os.environ.items() if name in _RECORDED and value}


def nccl_variables() -> dict[str, str | None]:
    """Return every NCCL_ and TORCH_NCCL_ variable that is set; the value of an unknown name is None."""
    return {
        name: value if name in _NCCL else None
        for name, value in os.environ.items()
        if name.startswith(("NCCL_", "TORCH_NCCL_")) and name != _TOGGLE and value and not _NAMES_A_SECRET.search(name)
    }


def slurm_facts() -> dict[str, str] | None:
    """Return the facts of the Slurm job; None outside of one."""
    if "SLURM_JOB_ID" not in os.environ:
        return None
    return {fact: os.environ[name] for fact, name in _SLURM.items() if os.environ.get(name)}


def _secrets() -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST_SECRET and _NAMES_A_SECRET.search(name.upper()) and not os.path.isdir(value)  # noqa: PTH112  # answers for a name that is too long, too
    ]


def check_no_secret(place: str, *values: Any) -> None:
    """Check that no secret of the environment is in values that the run's files will hold.

    Args:
        place: start of the sentence, such as "a flag".
        values: text, or anything that JSON may hold.
    """
    left, secrets = list(values), _secrets()
    while left:
        value = left.pop()
        if isinstance(value, dict):
            left += [*value, *value.values()]
        elif isinstance(value, list):
            left += value
        elif variable := next((name for name, secret in secrets if secret in str(value)), None):
            raise InputError(
                f"{place} holds the value of {variable}, and settings are written into files that others read; leave "
                "it in the environment, where every library looks for it"
            )
