"""List the formulas between the columns of a table, each with the conventions in use.

A power of a quantity that a table does not have rules a convention out, and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator

from testbed.audit.tables.fits import Formula, Powers

_DEVICES: tuple[Powers, ...] = ({"devices": 1}, {"nodes": 1, "devices_per_node": 1}, {"nodes": 1}, {"dp": 1})


def _times(*parts: Powers) -> Powers:
    """Return the product of some powers."""
    found: dict[str, int] = {}
    for part in parts:
        for name, power in part.items():
            found[name] = found.get(name, 0) + power
    return {name: power for name, power in found.items() if power}


def _inverse(powers: Powers) -> Powers:
    return {name: -power for name, power in powers.items()}


def _scopes(powers: Powers) -> tuple[Powers, ...]:
    """Return a convention for all devices, and those where one factor is of a single device."""
    others = [_times(powers, scope) for devices in _DEVICES for scope in (devices, _inverse(devices))]
    return (powers, *others)


def _rate_and_step() -> Iterator[Formula]:
    """Yield rate x time of a step = what a step does, known or the same for all rows."""
    for rate, unit in (("token_rate", "tokens"), ("sample_rate", "samples"), ("rate", "work"),
                       ("device_token_rate", "tokens"), ("device_sample_rate", "samples")):  # fmt: skip
        base = {rate: 1, "step_s": 1}
        of_batch = [{"batch": -1}, {"micro_batch": -1}, {"batch": -1, "accumulation": -1},
                    {"micro_batch": -1, "accumulation": -1}]  # fmt: skip
        known = [_times(base, batch, length) for batch in of_batch for length in ({"length": -1}, {})]
        yield Formula(
            f"{unit} per second x time of a step = batch" + " x length" * (unit == "tokens"), "step_s",
            tuple(scope for powers in known for scope in _scopes(powers)), is_one=True,
        )  # fmt: skip
        yield Formula(
            f"{unit} per second x time of a step is what a step does", "step_s",
            tuple(scope for powers in [*known, base] for scope in _scopes(powers)),
            hidden=("batch", "micro_batch", "length"), is_of_any_kind=True,
        )  # fmt: skip


def _flops() -> Iterator[Formula]:
    """Yield the formulas of FLOP/s: MFU, rates, and the FLOPs of a step."""
    for share in ("mfu", "hfu"):
        yield Formula(
            f"FLOP/s / {share.upper()} is the peak of the device",
            share,
            ({"flops": 1, share: -1},),
            is_of_flops=share == "hfu",
        )
        yield Formula(
            f"tokens/s of a device / {share.upper()} is the same for one model", share,
            ({"device_token_rate": 1, share: -1}, *_per_device({"token_rate": 1, share: -1}),
             {"device_sample_rate": 1, share: -1}, *_per_device({"sample_rate": 1, share: -1}),
             *_per_device({"rate": 1, share: -1})),
            hidden=("devices",),
        )  # fmt: skip
    rates = ("device_token_rate", "token_rate", "device_sample_rate", "sample_rate", "device_rate", "rate")
    yield Formula(
        "FLOP/s / rate is the work of a token or sample", "flops",
        tuple(variant for rate in rates for variant in _per_device({"flops": -1, rate: 1})),
        hidden=("devices", "length"), is_of_flops=True,
    )  # fmt: skip
    work = {"flops": 1, "step_s": 1}
    of_batch = [{"batch": -1}, {"micro_batch": -1}, {}]
    yield Formula(
        "FLOP/s x devices x time of a step / batch is the work of a sample", "step_s",
        tuple(_times(work, batch, devices) for batch in of_batch for devices in (*_DEVICES, {})), hidden=("batch",),
        never_left_out=("batch",), is_of_flops=True,
    )  # fmt: skip
    all_flops = tuple(_times({"all_flops": -1, "flops": 1}, devices) for devices in _DEVICES)
    yield Formula("FLOP/s of all = FLOP/s of one x devices", "all_flops", all_flops, is_one=True)


def _per_device(powers: Powers) -> tuple[Powers, ...]:
    """Return a rate that is of all devices divided by them, and as it stands."""
    return (*(_times(powers, _inverse(devices)) for devices in _DEVICES), powers)


def _counts() -> Iterator[Formula]:
    """Yield the formulas of devices, batches and tokens."""
    for rate, device_rate in (("token_rate", "device_token_rate"), ("sample_rate", "device_sample_rate"),
                              ("rate", "device_rate")):  # fmt: skip
        variants = tuple(_times({rate: -1, device_rate: 1}, devices) for devices in _DEVICES)
        yield Formula("rate of all = rate of one device x devices", rate, variants, is_one=True)
    yield Formula("tokens/s = samples/s x length", "token_rate",
                  ({"token_rate": -1, "sample_rate": 1, "length": 1},), is_one=True)  # fmt: skip
    yield Formula("steps/s x time of a step = 1", "step_rate", ({"step_rate": 1, "step_s": 1},), is_one=True)
    of_step = [{"batch": 1}, {"micro_batch": 1}, {"batch": 1, "accumulation": 1}, {"micro_batch": 1, "accumulation": 1}]
    for rate, unit, lengths in (("sample_rate", "samples", ({},)), ("token_rate", "tokens", ({"length": 1}, {})),
                                ("device_token_rate", "tokens", ({"length": 1}, {}))):  # fmt: skip
        base = {"step_rate": 1, rate: -1}
        of_rate = [scope for batch in of_step for length in lengths for scope in _scopes(_times(base, batch, length))]
        yield Formula(f"{unit}/s = steps/s x {unit} of a step", "step_rate", tuple(of_rate), is_one=True)
    yield Formula("tokens/s / samples/s is the length", "token_rate", ({"token_rate": -1, "sample_rate": 1},),
                  hidden=("length",))  # fmt: skip
    parallel: tuple[Powers, ...] = (
        {"dp": 1, "tp": 1, "pp": 1, "cp": 1}, {"dp": 1, "tp": 1, "pp": 1}, {"dp": 1, "tp": 1}, {"dp": 1, "pp": 1},
        {"tp": 1, "pp": 1},
    )  # fmt: skip
    yield Formula("devices = data x tensor x pipeline x context parallel", "devices",
                  tuple(_times(product, {"devices": -1}) for product in parallel), is_one=True,
                  never_left_out=("dp", "tp", "pp", "cp"))  # fmt: skip
    of_nodes = [_times(product, {"nodes": -1}) for product in parallel[:4]]
    yield Formula("data x tensor x pipeline parallel / nodes is what a node has", "dp",
                  (*(_times(product, {"devices_per_node": -1}) for product in of_nodes), *of_nodes),
                  never_left_out=("tp", "pp", "cp"))  # fmt: skip
    yield Formula("devices / nodes is what a node has", "devices", ({"devices": 1, "nodes": -1},))
    batch: list[Powers] = [{"micro_batch": 1, "accumulation": 1}, {"micro_batch": 1}]
    ranks: list[Powers] = [{"dp": 1}, {"devices": 1}, {"devices": 1, "tp": -1}, {"devices": 1, "tp": -1, "pp": -1},
                           {"devices": 1, "pp": -1}, {"nodes": 1, "devices_per_node": 1}, {},
                           {"devices": 1, "tp": -1, "pp": -1, "cp": -1}, {"devices": 1, "tp": -1, "cp": -1},
                           {"devices": 1, "pp": -1, "cp": -1}, {"devices": 1, "cp": -1}]  # fmt: skip
    batches = tuple(_times(micro, data, {"batch": -1}) for micro in batch for data in ranks)
    yield Formula("global batch = micro batch x accumulation x data ranks", "batch", batches, is_one=True)
    done = [{"tokens": -1, "steps": 1, "batch": 1, "length": 1}, {"tokens": -1, "steps": 1, "batch": 1},
            {"tokens": -1, "steps": 1, "micro_batch": 1, "length": 1}]  # fmt: skip
    yield Formula("tokens = steps x batch x length", "tokens",
                  tuple(scope for powers in done for scope in _scopes(powers)), is_one=True)  # fmt: skip
    yield Formula("time = steps x time of a step", "time_s", ({"time_s": -1, "steps": 1, "step_s": 1},), is_one=True)
    yield Formula(
        "tokens/s = tokens / time", "token_rate", ({"token_rate": -1, "tokens": 1, "time_s": -1},), is_one=True
    )
    yield Formula("device hours = devices x time", "device_hours",
                  tuple(_times({"device_hours": -1, "time_s": 1}, devices) for devices in _DEVICES))  # fmt: skip


def _ratios() -> Iterator[Formula]:
    """Yield what a speed-up or an efficiency is divided from, row against row."""
    rates = ("device_token_rate", "token_rate", "device_sample_rate", "sample_rate", "device_rate", "rate", "step_rate")
    fast = [{name: 1} for name in (*rates, "flops", "all_flops", "mfu")]
    slow = [{name: -1} for name in ("step_s", "time_s", "device_hours")]
    for name in ("speedup", "ratio"):
        yield Formula(
            "a speed-up is a rate or a time against that of the reference", name,
            tuple(scope for base in [*fast, *slow] for scope in _scopes(_times(base, {name: -1}))), is_definition=True,
        )  # fmt: skip
    of_device = [{"device_token_rate": 1}, {"device_sample_rate": 1}, {"device_rate": 1}]
    of_all = [base for base in [*fast, *slow, {"speedup": 1}] if base not in of_device]
    usual = [*of_device, *(_times(base, _inverse(devices)) for base in of_all for devices in _DEVICES)]
    others = [scope for base in [*of_device, *of_all] for scope in _scopes(base)]
    yield Formula(
        "efficiency is a rate or a speed-up per device, against that of the reference", "efficiency",
        tuple(_times(base, {"efficiency": -1}) for base in [*usual, *others]), is_definition=True,
    )  # fmt: skip


FORMULAS: tuple[Formula, ...] = (*_counts(), *_rate_and_step(), *_flops(), *_ratios())
