"""Write the network study in Markdown: the blocks of docs/results/network/README.md."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from testbed.analysis.document.words import rate
from testbed.analysis.statistics import NO_DIFFERENCE, NOT_ENOUGH
from testbed.experiments.network_lab.bounds import share_ready_last
from testbed.experiments.network_lab.results import (
    BEST_OF,
    LinkComparison,
    Summary,
    all_reduces,
    comparisons,
    largest_loss_difference,
    last_loss_of,
    pictures,
    summaries,
    tokens_of,
)


def tables(content: Mapping[str, Any]) -> dict[str, str]:
    """Return Markdown by the name of its place in the page."""
    return {
        "what was measured": "\n".join(filter(None, [what_was_measured(content), left_out(content), count(content)])),
        "strategies": f"{strategies_table(content)}\n\nAgainst ddp over the same link:\n\n{against_ddp_table(content)}",
        "all-reduce": all_reduce_table(content),
        "overlap": overlap_table(content),
        "levers": levers_table(content),
    }


def blocks(content: Mapping[str, Any]) -> dict[str, str]:
    """Return what stands in the page: the tables, below the pictures that are drawn next to the file."""
    found = tables(content)
    for name, (title, _) in reversed(pictures(content).items()):
        place = "levers" if name == "levers" else "strategies"
        found[place] = f"![{title}](network_{name}.png)\n\n{found[place]}"
    return found


def what_was_measured(content: Mapping[str, Any]) -> str:
    """Return a paragraph: the work, the machine, the number of runs."""
    work, hardware = content["work"], content["hardware"]
    timed = sum(run["kind"] == "timed" for run in content["runs"])
    commits = ", ".join(f"`{commit}`" for commit in content["git_commits"])
    torch, cores = content["env"].get("torch_version"), hardware["cpu_cores_visible"]
    lines = [
        f"{timed} timed and {len(content['runs']) - timed} profiled runs of {work['model_name']} "
        f"({work['model_size']}, {work['num_parameters']:,} parameters, so {work['gradient_bytes'] / 1e6:.2f} MB of "
        f"gradients), {work['precision']}, sequences of {work['seq_len']} tokens, {work['steps']} steps each, "
        f"the first {work['warmup_steps']} warm-up; {content['repeats']} interleaved rounds. One rank with one thread "
        f"per host, all hosts on one machine with {cores} cores ({hardware['cpu_name']}), {hardware['backend']}, "
        f"PyTorch {torch}, commit {commits}{' with changes' if content['git_dirty'] else ''}.",
    ]
    difference = largest_loss_difference(content)
    if difference is not None:
        lines.append(f"The last losses of all runs of equal work lie within {difference:.1e} of each other.")
    if content["status"] != "complete":
        lines.append("**The study was interrupted: not all runs were made.**")
    if content["not_measured"]:
        lines.append(f"**Not measured: {'; '.join(f'{k}: {v}' for k, v in content['not_measured'].items())}.**")
    return "\n".join(lines)


def left_out(content: Mapping[str, Any]) -> str:
    """Return which cells of strategies x hosts x links were not asked for; empty where there is none."""
    plain = [arm for arm in content["arms"] if arm["lever"] is None]
    titles, said, missing = _titles(content), [], 0
    strategies, links = ({arm[name] for arm in plain} for name in ("strategy", "link"))
    for hosts in sorted({arm["hosts"] for arm in plain}):
        here = [arm for arm in plain if arm["hosts"] == hosts]
        if len(here) < len(strategies) * len(links):
            missing += len(strategies) * len(links) - len(here)
            over = [
                f"{', '.join(arm['title'] for arm in here if arm['link'] == link)} over {titles[link]}"
                for link in titles
                if any(arm["link"] == link for arm in here)
            ]
            said.append(f"on {hosts} hosts there are only {'; '.join(over)}")
    return f"Left out of strategies x hosts x links are {missing} cells: {', and '.join(said)}." if said else ""


def count(content: Mapping[str, Any]) -> str:
    """Return how many verdicts the tables hold; empty where there are too few repeats for any."""
    verdicts_made = sum(each.verdict != NOT_ENOUGH for each in comparisons(content))
    if not verdicts_made:
        return ""
    return (
        f"The tables below hold {verdicts_made} verdicts, each from a 95 % interval of its own. None is corrected for "
        "their number: of twenty pairs without a difference, one would be expected to show one."
    )


def strategies_table(content: Mapping[str, Any]) -> str:
    """Return a row per strategy, hosts and link; against the same strategy over the link's reference."""
    arms, titles = _arms(content), _titles(content)
    against = {each.slower: each for each in comparisons(content) if each.question == "link"}
    lines = [
        "| hosts | link | strategy | n | step (ms) | tokens/s | profiled runs (their step over the timed) | exposed "
        "communication (ms) | covered (ms) | idle (ms) | bound (ms) | collectives | traffic | tokens/s over the "
        "reference link, over these | reference |",
        "|---:|---|---|---:|---:|---:|---|---:|---:|---:|---:|---:|---:|---|---|",
    ]
    for summary in summaries(content):
        arm = arms[summary.arm]
        if arm["lever"] is None:
            told = against.get(summary.arm)
            reference = (
                ("", "")
                if told is None
                else (_ratio(told), f"{_reference(told)} ({titles[arms[told.faster]['link']]})")
            )
            place = (arm["hosts"], titles[arm["link"]], arm["title"], summary.num_runs, _step(summary))
            traffic = "" if summary.traffic is None else f"{summary.traffic:.2f}"
            waits = (_profiled(summary), _ms(summary.exposed_s), _ms(summary.covered_s), _ms(summary.idle_s))
            times = (*waits, _ms(summary.bound_s), _count(summary.num_collectives), traffic, *reference)
            lines.append(_line(*place, rate(summary.median_tokens_per_s), *times))
    return "\n".join(lines)


def _reference(told: LinkComparison) -> str:
    """Return the verdict on the link that a link is compared to."""
    return told.verdict if told.verdict in (NO_DIFFERENCE, NOT_ENOUGH) else f"the reference is {told.verdict}"


def against_ddp_table(content: Mapping[str, Any]) -> str:
    """Compare each strategy to ddp over the same link and number of hosts; allreduce is in the table of overlap."""
    arms, titles = _arms(content), _titles(content)
    lines = [
        "| hosts | link | strategy | tokens/s over those of ddp | verdict: the strategy is |",
        "|---:|---|---|---|---|",
    ]
    for each in comparisons(content):
        if each.question == "strategy":
            arm = arms[each.faster]
            lines.append(_line(arm["hosts"], titles[arm["link"]], arm["title"], _ratio(each), each.verdict))
    return _or_nothing(lines)


def all_reduce_table(content: Mapping[str, Any]) -> str:
    """Return the table of the gradients' all-reduce alone."""
    titles = _titles(content)
    lines = [
        f"| hosts | link | all-reduce of the gradients, best of {BEST_OF} (ms) | bound (ms) | over the bound | runs |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for each in all_reduces(content):
        over = "" if each.over_bound is None else f"{each.over_bound:.2f}"
        lines.append(_line(each.hosts, titles[each.link], _ms(each.seconds), _ms(each.bound_s), over, each.num_runs))
    return _or_nothing(lines)


def overlap_table(content: Mapping[str, Any]) -> str:
    """Compare allreduce to ddp: what of the ratio is fewer messages, and what is overlap."""
    arms, titles = _arms(content), _titles(content)
    found = {summary.arm: summary for summary in summaries(content)}
    meanings = {
        "ddp": "allreduce, then ddp as it is",
        "coalescing": "allreduce, then ddp in one bucket: fewer messages alone",
        "both": "allreduce, then ddp in small buckets: fewer messages and overlap together",
        "overlap": "ddp in one bucket, then in small buckets: overlap, less the cost of more messages",
    }
    lines = [
        "| hosts | link | first and second: what the ratio holds | tokens/s of the second over the first's | verdict: "
        "the second is | collectives | profiled runs (their step over the timed) | exposed, first (ms) | exposed, "
        "second (ms) | covered, first (ms) | covered, second (ms) |",
        "|---:|---|---|---|---|---|---|---:|---:|---:|---:|",
    ]
    for each in comparisons(content):
        if each.question in meanings:
            arm = arms[each.faster]
            pair = found[each.slower], found[each.faster]
            counts = " and ".join(_count(summary.num_collectives) for summary in pair)
            profiled = " and ".join(_profiled(summary) for summary in pair)
            times = [_ms(summary.exposed_s) for summary in pair] + [_ms(summary.covered_s) for summary in pair]
            what = (meanings[each.question], _ratio(each), each.verdict, counts, profiled)
            lines.append(_line(arm["hosts"], titles[arm["link"]], *what, *times))
    return f"{ceiling(content)}\n\n{_or_nothing(lines)}"


def ceiling(content: Mapping[str, Any]) -> str:
    """Return how much can overlap at all, from the shapes."""
    work = content["work"]
    last = share_ready_last(work)
    return (
        f"There is a ceiling: {work['model_name']}'s token embedding is also its head, so its gradient is complete "
        f"only at the end of backward, as is that of the positions. They are {last:.0%} of the gradients' bytes here "
        f"(a vocabulary of {work['vocab_size']:,}), so at most {1 - last:.0%} can overlap with computing, in buckets "
        "of any size."
    )


def levers_table(content: Mapping[str, Any]) -> str:
    """Compare each lever to the same strategy as it is."""
    arms, titles = _arms(content), _titles(content)
    found = {summary.arm: summary for summary in summaries(content)}
    lines = [
        "| strategy | with | hosts | link | n | step (ms) | tokens/s | profiled runs (their step over the timed) | "
        "exposed communication (ms) | collectives | tokens/s over those without | verdict | last loss | last loss "
        "without | work |",
        "|---|---|---:|---|---:|---:|---:|---|---:|---:|---|---|---:|---:|---|",
    ]
    other_batches = set()
    for each in comparisons(content):
        if each.question == "lever":
            arm, summary = arms[each.faster], found[each.faster]
            strategy = arms[each.slower]["title"]
            place = (strategy, arm["lever"], arm["hosts"], titles[arm["link"]], summary.num_runs, _step(summary))
            traced = (_profiled(summary), _ms(summary.exposed_s), _count(summary.num_collectives))
            speed = (rate(summary.median_tokens_per_s), *traced, _ratio(each))
            losses = [f"{last_loss_of(content, name):.5f}" for name in (each.faster, each.slower)]
            lines.append(_line(*place, *speed, each.verdict, *losses, "another" if arm["changes_work"] else "equal"))
            if tokens_of(content, each.faster) != tokens_of(content, each.slower):
                other_batches.add(arm["lever"])
    if other_batches:
        lines += [
            "",
            f"Losses after equally many steps are not comparable where a step takes another number of tokens "
            f"({', '.join(sorted(other_batches))}): the runs have seen different amounts of text.",
        ]
    return _or_nothing(lines)


def _profiled(summary: Summary) -> str:
    """Return the number of profiled runs, and their step over the timed one."""
    over = summary.profiled_over_timed
    return str(summary.num_profiled) + ("" if over is None else f" ({over:.2f})")


def _count(number: float | None) -> str:
    return "" if number is None else f"{number:g}"


def _or_nothing(lines: list[str]) -> str:
    """Return the table, or a sentence where it has no row."""
    return "\n".join(lines) if len(lines) > 2 else "Not asked for in this study."


def _line(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _arms(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {arm["name"]: arm for arm in content["arms"]}


def _titles(content: Mapping[str, Any]) -> dict[str, str]:
    return {link["name"]: link["title"] for link in content["links"]}


def _ms(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:,.0f}" if seconds >= 0.1 else f"{1000 * seconds:.1f}"


def _step(summary: Summary) -> str:
    bounds = "" if summary.low_step_s is None else f" [{_ms(max(0.0, summary.low_step_s))}, {_ms(summary.high_step_s)}]"
    return _ms(summary.median_step_s) + bounds


def _ratio(each: LinkComparison) -> str:
    """Return a ratio with as many digits as show that its interval leaves 1 out, where it does."""
    if each.low is None or each.high is None:
        return f"{each.ratio:.2f}x"
    is_apart = not each.low <= 1 <= each.high
    for places in (2, 3, 4):
        low, high = (f"{bound:.{places}f}" for bound in (each.low, each.high))
        if not is_apart or f"{1:.{places}f}" not in (low, high):
            break  # nearer to 1 than 0.00005 it is shown as 1.0000
    return f"{each.ratio:.{places}f}x [{low}, {high}]"
