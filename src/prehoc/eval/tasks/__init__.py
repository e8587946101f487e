"""The tasks by name; each family is one file."""

from __future__ import annotations

from prehoc.eval.tasks import coqa, gsm8k, kv_retrieval, longbench, longbench2, niah, ruler, wikitext
from prehoc.eval.tasks.base import Context, Fault, Loaded, Metric, MissingData, Sample, Source, Task, check_known

TASKS: dict[str, Task] = {
    task.name: task
    for family in (gsm8k, coqa, wikitext, longbench, longbench2, ruler, niah, kv_retrieval)
    for task in family.TASKS
}
GROUPS: dict[str, tuple[str, ...]] = {
    "longbench": tuple(task.name for task in longbench.TASKS),
    "ruler": tuple(task.name for task in ruler.TASKS),
}


def choose(names: str) -> list[tuple[Task, bool]]:
    """Return the tasks of a list of names separated by commas, and for each whether it was named itself.

    A task that comes from a group may be left out when its data is missing.

    Raises
    ------
    ValueError
        For an unknown name, with the nearest known one.
    """
    found: dict[str, bool] = {}
    for name in filter(None, (part.strip() for part in names.split(","))):
        check_known(name, [*TASKS, *GROUPS])
        for one in GROUPS.get(name, (name,)):
            found[one] = found.get(one, False) or name in TASKS
    if not found:
        raise ValueError(f"--tasks {names!r} names no task; write for example coqa,kv_retrieval")
    return [(TASKS[name], named) for name, named in found.items()]


__all__ = [
    "GROUPS",
    "TASKS",
    "Context",
    "Fault",
    "Loaded",
    "Metric",
    "MissingData",
    "Sample",
    "Source",
    "Task",
    "choose",
]
