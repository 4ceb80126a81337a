"""Send the rows of a run to where people watch runs: TensorBoard, Weights & Biases, MLflow, trackio. Rank 0 alone.

Each tracker has a thread and a queue of its own: a step hands over a row and goes on. One that fails or hangs loses its
own rows, and no step waits for it. The names of metrics are the same in all of them. Without credentials and without an
address each writes into the run's folder.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import queue
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from testbed.config.tracker_names import MLFLOW, TENSORBOARD, TRACKIO, WANDB, trackers_of
from testbed.errors import first_line

if TYPE_CHECKING:
    from testbed.config.settings import RunSettings
    from testbed.metrics.world_step import WorldStep

PROJECT = "gpt2-testbed"
FLUSH_S = 5  # what a run that is killed loses of TensorBoard and W&B at most
CLOSE_S, LEAVE_S = 30.0, 5.0  # that the end of a run, and of a start that is stopped or fails, wait for all trackers
HANGING_S = 30.0  # a call of a library that has taken so long hangs, and no end waits for it
MOST_WAITING = 100_000  # rows that a tracker has not taken yet; one that is further behind gets no more
MOST_AT_ONCE = 20  # rows that HANGING_S holds for together: a second and a half for each of them
WANDB_STEP, MLFLOW_FILE = "optimizer_step", "mlflow.db"
LONGEST_PARAMETER = 6000  # characters: MLflow refuses more (mlflow.utils.validation.MAX_PARAM_VAL_LENGTH)
Row = tuple[int, dict[str, float]]  # optimizer step, values by the names of metrics


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker is told of a run when it begins.

    Attributes:
        curves: folder of TensorBoard's files.
        folder: of what the others write without a server.
        first_step: optimizer steps done by earlier starts.
        config: flags, and facts of the machine.
        files: to attach to a run that ended well, those that exist.
    """

    run_id: str
    name: str
    curves: Path
    folder: Path
    first_step: int
    config: dict[str, Any]
    files: tuple[Path, ...]


class Tracker(Protocol):
    def log(self, rows: Sequence[Row]) -> None: ...
    def close(self, files: Sequence[Path], exit_code: int) -> None: ...


class _TensorBoard:
    def __init__(self, run: TrackedRun):
        from torch.utils.tensorboard import SummaryWriter  # 2 s that a run without it does not owe

        # purge_step: steps after the checkpoint that a resumed run begins with are trained again
        purge_step = run.first_step + 1 if run.first_step else None
        self._writer = SummaryWriter(str(run.curves), purge_step=purge_step, flush_secs=FLUSH_S)

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self, files: Sequence[Path], exit_code: int) -> None:
        self._writer.close()


class _Wandb:
    def __init__(self, run: TrackedRun):
        import wandb
        from requests.utils import get_netrc_auth

        server = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
        knows_user = os.environ.get("WANDB_API_KEY") or get_netrc_auth(server)
        mode = os.environ.get("WANDB_MODE") or ("online" if knows_user else "offline")
        run.folder.mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run.run_id,
            name=run.name,
            resume="allow",  # offline too: each start has a folder, and `wandb sync` puts one behind the other
            dir=str(run.folder),
            config=run.config,
            mode=mode,  # type: ignore[arg-type]  # as the variable says it
            # of a machine and its user nothing but what the run's own files say
            settings=wandb.Settings(
                silent=True,
                console="off",
                x_disable_stats=True,
                x_disable_meta=True,
                disable_git=True,
                save_code=False,
                x_transaction_log_flush_interval=FLUSH_S,
            ),
        )
        # an axis of its own: wandb's own step never goes back, and a resumed run trains steps again
        self._run.define_metric("*", step_metric=WANDB_STEP)

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._run.log({WANDB_STEP: step, **values})

    def close(self, files: Sequence[Path], exit_code: int) -> None:
        folder = self._run.dir
        for file in files:  # a copy: it would link to the run's own, which may be moved before the upload
            self._run.save(shutil.copy(file, folder), base_path=folder, policy="now", glob=False)
        self._run.finish(exit_code=exit_code)


def _make_tables(file: Path) -> None:
    """Make MLflow's database, unless it is there. It takes seconds, and a process that is killed must leave no half."""
    if file.exists():
        return
    from mlflow.tracking import MlflowClient

    for name in ("alembic", "mlflow.store.db.utils"):  # which tell of each table
        logging.getLogger(name).setLevel(logging.WARNING)
    file.parent.mkdir(parents=True, exist_ok=True)
    making = file.with_name(f"{file.name}.making")
    making.unlink(missing_ok=True)
    MlflowClient(f"sqlite:///{making.absolute()}").search_experiments(max_results=1)
    making.replace(file)


class _Mlflow:
    def __init__(self, run: TrackedRun):
        from mlflow.entities import Param
        from mlflow.tracking import MlflowClient

        address = os.environ.get("MLFLOW_TRACKING_URI")
        self._client = MlflowClient(address or f"sqlite:///{(run.folder / MLFLOW_FILE).absolute()}")
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            experiment = found.experiment_id
        else:
            files = None if address else (run.folder.absolute() / "mlartifacts").as_uri()
            experiment = self._client.create_experiment(name, artifact_location=files)
        known = self._client.search_runs([experiment], f"tags.`testbed.run_id` = '{run.run_id}'", max_results=1)
        tags = {"testbed.run_id": run.run_id, "mlflow.runName": run.name}
        made = known[0] if known else self._client.create_run(experiment, tags=tags)
        self._id = made.info.run_id
        if made.data.params:  # which cannot change: they stay those of the first start
            self._client.update_run(self._id, status="RUNNING")
            return
        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in _flat(run.config).items()]
        for start in range(0, len(parameters), 100):  # as many as it takes at once
            self._client.log_batch(self._id, params=parameters[start : start + 100])

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)  # noqa: TID251 - a moment, for people
        metrics = [Metric(name, value, now_ms, step) for step, values in rows for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)  # it takes 1,000 at once

    def close(self, files: Sequence[Path], exit_code: int) -> None:
        for file in files:
            self._client.log_artifact(self._id, str(file))
        self._client.set_terminated(self._id, {0: "FINISHED", 1: "FAILED"}.get(exit_code, "KILLED"))


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Return {"env.torch_version": ...} of {"env": {"torch_version": ...}}: MLflow's parameters are text."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


class _Trackio:
    def __init__(self, run: TrackedRun):
        import trackio
        import trackio.run
        import trackio.utils

        for module in (trackio, trackio.run, trackio.utils):  # it has no quiet mode, and names no folder to look in
            vars(module)["print"] = lambda *_, **__: None
        self._library = trackio
        trackio.init(
            project=PROJECT,
            name=run.run_id,  # which a resumed run is found by
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, rows: Sequence[Row]) -> None:
        for step, values in rows:
            self._library.log(values, step=step)

    def close(self, files: Sequence[Path], exit_code: int) -> None:
        for file in files:
            self._library.save(str(file), project=PROJECT)
        self._library.finish()


OPENERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    TENSORBOARD: _TensorBoard,
    WANDB: _Wandb,
    MLFLOW: _Mlflow,
    TRACKIO: _Trackio,
}
LIBRARIES = {TENSORBOARD: "torch.utils.tensorboard", WANDB: "wandb", MLFLOW: "mlflow.tracking", TRACKIO: "trackio"}


class _Channel(threading.Thread):
    """Hands rows to one tracker. `failure`: why it takes no more."""

    def __init__(self, name: str, run: TrackedRun):
        super().__init__(name=f"tracker {name}", daemon=True)  # a process does not wait for a server that hangs
        self.tracker_name, self._run = name, run
        self.failure: str | None = None
        self._rows: queue.Queue[Row | int] = queue.Queue()  # an exit code is the last
        self._call_s = math.inf  # when the library was called that has not returned; inf: it waits for rows

    def put(self, row: Row) -> None:
        if self._rows.qsize() >= MOST_WAITING:
            self.failure = f"{MOST_WAITING:,} rows wait for it"
        self._rows.put(row)

    def end(self, exit_code: int) -> None:
        self._rows.put(exit_code)

    def wait(self, until_s: float) -> None:
        """Wait until all rows are taken, at most until then, and for no call that hangs."""
        while self.is_alive() and (left_s := min(until_s, self._call_s + HANGING_S) - time.monotonic()) > 0:
            self.join(left_s)

    def run(self) -> None:
        try:
            self._call_s, end = time.monotonic(), None
            tracker = OPENERS[self.tracker_name](self._run)
            while end is None:
                self._call_s = math.inf
                items = [self._rows.get()]
                self._call_s = time.monotonic()
                while len(items) < MOST_AT_ONCE and not self._rows.empty():
                    items.append(self._rows.get())
                end = next((item for item in items if isinstance(item, int)), None)
                if rows := [item for item in items if isinstance(item, tuple)]:
                    tracker.log(rows)
            self._call_s = time.monotonic()
            files = [file for file in self._run.files if file.exists()] if end == 0 else []
            tracker.close(files, end)
        except BaseException as error:  # whatever a library or a server does, also exit(), ends no training
            self.failure = first_line(error)


class Trackers:
    """All trackers that --track and --tensorboard name; none on other ranks than 0."""

    def __init__(self, settings: RunSettings, run: TrackedRun, is_writer: bool, say: Callable[[str], None]):
        self._say, self._tokens_per_step = say, settings.tokens_per_step
        names = trackers_of(settings.measuring.track, settings.measuring.tensorboard) if is_writer else ()
        self._channels = [_Channel(name, run) for name in names]
        self._is_closed = self._has_failed = False
        theirs = os.environ.get("TRACKIO_DIR")  # which trackio reads when it is imported
        os.environ["TRACKIO_DIR"] = theirs or str(run.folder.absolute() / "trackio")
        for channel in self._channels:
            try:  # seconds that no step owes
                importlib.import_module(LIBRARIES[channel.tracker_name])
                if channel.tracker_name == MLFLOW and "MLFLOW_TRACKING_URI" not in os.environ:
                    _make_tables(run.folder / MLFLOW_FILE)
            except Exception as error:
                channel.failure = first_line(error)
        if not theirs:  # and processes that this one starts should not
            del os.environ["TRACKIO_DIR"]
        for channel in self._channels:  # after all imports: two threads that import can get halves of modules
            if channel.failure is None:
                channel.start()

    @property
    def may_hold_up_exit(self) -> bool:
        """Return, after `close`, whether a tracker still works or has failed: what its library does when the
        interpreter ends may wait for the server.
        """
        return self._has_failed or any(channel.is_alive() for channel in self._channels)

    def add_step(self, step: int, world: WorldStep, learning_rate: float) -> None:
        if not self._channels:
            return
        assert world.grad_norm is not None
        self._add(
            step,
            {
                "train/loss": world.loss,
                "train/grad_norm": world.grad_norm,
                "train/learning_rate": learning_rate,
                "train/tokens": float(step * self._tokens_per_step),
                "speed/step_time_s": world.step_time_s,
                "speed/tokens_per_s": self._tokens_per_step / world.step_time_s,
            },
        )

    def add_validation(self, step: int, loss: float, answers: dict[str, Any] | None = None) -> None:
        """Pass on a validation. `answers`: the `multiple_choice` field; None: no questions were asked."""
        shares = {} if answers is None else answers["accuracy"]
        accuracy = {f"validation/multiple_choice_{way}": share["value"] for way, share in shares.items()}
        self._add(step, {"validation/loss": loss, **accuracy})

    def _add(self, step: int, values: dict[str, float]) -> None:
        finite = {name: value for name, value in values.items() if math.isfinite(value)}  # fp16 skipped the update
        for channel in self._channels:
            channel.put((step, finite))
        self._tell_failures()

    def _tell_failures(self) -> None:
        failed = [channel for channel in self._channels if channel.failure is not None]
        self._channels = [channel for channel in self._channels if channel not in failed]
        for channel in failed:
            self._has_failed = True
            self._say(
                f"warning: --track {channel.tracker_name} ended ({channel.failure}); the run goes on without it, and "
                "training_metrics.json has every row"
            )

    def close(self, exit_code: int) -> None:
        """Wait until the trackers have all rows and the run's exit code, at most CLOSE_S, or LEAVE_S of a run that did
        not end well, and not for one that hangs. Only the first call does something.
        """
        if self._is_closed:
            return
        self._is_closed = True
        for channel in self._channels:
            channel.end(exit_code)
        until_s = time.monotonic() + (LEAVE_S if exit_code else CLOSE_S)
        for channel in self._channels:
            channel.wait(until_s)
            if channel.is_alive():
                name = channel.tracker_name
                self._say(f"warning: --track {name} did not take all rows in time; training_metrics.json has them")
        self._tell_failures()
