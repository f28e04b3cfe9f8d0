"""Groups in line: by their places, not by when they came into the queue. Host only."""

from collections import OrderedDict
from operator import attrgetter

from pagedjax.scheduling.group import SequenceGroup

Queue = OrderedDict[str, SequenceGroup]
"""Groups by name, the first in line in front."""


def put_in_line(queue: Queue, group: SequenceGroup) -> Queue:
    """`queue`, with one more at its place: mostly, and without a look at all others, the last or the first."""
    if not queue or next(reversed(queue.values())).arrival < group.arrival:
        queue[group.name] = group
    elif group.arrival < next(iter(queue.values())).arrival:
        queue[group.name] = group
        queue.move_to_end(group.name, last=False)
    else:
        groups = sorted([*queue.values(), group], key=attrgetter("arrival"))
        queue = OrderedDict((each.name, each) for each in groups)
    return queue
