"""Policies as their papers tell them, with lists and searches: `OTHERS` and `RANKS` are what the tests compare with."""


class BruteForce:
    """A cache that looks at everything: for each object what `rank` makes of its record; the lowest goes."""

    def __init__(self, capacity, rank):
        self.capacity, self.rank, self.records, self.clock = capacity, rank, {}, 0

    def access(self, key):
        self.clock += 1
        hit = key in self.records
        if not hit and len(self.records) == self.capacity:
            del self.records[min(self.records, key=lambda other: self.rank(self.records[other]))]
        record = self.records.setdefault(key, {"inserted": self.clock, "uses": 0})
        record["uses"] += 1
        record["used"] = self.clock
        return hit


RANKS = {
    "fifo": lambda record: record["inserted"],
    "lru": lambda record: record["used"],
    # The object that came to its number of uses first is the one whose last use is longest ago.
    "lfu": lambda record: (record["uses"], record["used"]),
    "prefix_lru": lambda record: record["used"],
    "prefix_depth": lambda record: record["used"],
}


def sieve_by_a_list(capacity, keys):
    """SIEVE as the paper tells it, the queue a list with the oldest first."""
    queue, visited, hand, hits = [], set(), 0, []
    for key in keys:
        hits.append(key in queue)
        if hits[-1]:
            visited.add(key)
            continue
        if len(queue) == capacity:
            while queue[hand % len(queue)] in visited:
                visited.discard(queue[hand % len(queue)])
                hand = hand % len(queue) + 1
            hand %= len(queue)
            del queue[hand]
        queue.append(key)
        if hand == len(queue) - 1:
            hand = 0  # it had passed the newest before this one came
    return hits


def arc_by_the_paper(capacity, keys):
    """ARC(c), figure 4 of the paper, with lists."""
    t1, t2, b1, b2, target, hits = [], [], [], [], 0.0, []

    def replace(in_b2):
        if t1 and (len(t1) > target or (in_b2 and len(t1) == target)):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for key in keys:
        hits.append(key in t1 or key in t2)
        if hits[-1]:
            (t1 if key in t1 else t2).remove(key)
            t2.append(key)
        elif key in b1:
            target = min(target + max(len(b2) / len(b1), 1), capacity)
            b1.remove(key)
            replace(False)
            t2.append(key)
        elif key in b2:
            target = max(target - max(len(b1) / len(b2), 1), 0)
            b2.remove(key)
            replace(True)
            t2.append(key)
        else:
            if len(t1) + len(b1) == capacity:
                if len(t1) < capacity:
                    b1.pop(0)
                    replace(False)
                else:
                    t1.pop(0)
            elif len(t1) + len(t2) + len(b1) + len(b2) >= capacity:
                if len(t1) + len(t2) + len(b1) + len(b2) == 2 * capacity:
                    b2.pop(0)
                if len(t1) + len(t2) == capacity:
                    replace(False)
            t1.append(key)
    return hits


def twoq_by_the_paper(capacity, keys):
    """2Q, full version, with lists: Kin a quarter, Kout a half."""
    kin, kout, a1in, a1out, am, hits = max(1, capacity // 4), max(1, capacity // 2), [], [], [], []
    for key in keys:
        hits.append(key in a1in or key in am)
        if key in am:
            am.remove(key)
            am.append(key)
        elif key not in a1in:
            returns = key in a1out
            if returns:
                a1out.remove(key)
            if len(a1in) + len(am) == capacity:
                if len(a1in) > kin or not am:
                    a1out.append(a1in.pop(0))
                    del a1out[:-kout]
                else:
                    am.pop(0)
            (am if returns else a1in).append(key)
    return hits


class Segments:
    """Segmented LRU with lists, the oldest first; the probation segment of W-TinyLFU too."""

    def __init__(self, limit):
        self.limit, self.probation, self.protected = limit, [], []

    def hit(self, key):
        (self.protected if key in self.protected else self.probation).remove(key)
        self.protected.append(key)
        if len(self.protected) > self.limit:
            self.probation.append(self.protected.pop(0))

    def victim(self):
        return (self.probation + self.protected)[0]

    def remove(self, key):
        (self.protected if key in self.protected else self.probation).remove(key)

    def __contains__(self, key):
        return key in self.probation or key in self.protected


def slru_by_lists(capacity, keys):
    segments, hits = Segments(capacity * 4 // 5), []
    for key in keys:
        hits.append(key in segments)
        if hits[-1]:
            segments.hit(key)
            continue
        if len(segments.probation) + len(segments.protected) == capacity:
            segments.remove(segments.victim())
        segments.probation.append(key)
    return hits


def splitmix(number):
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ number >> 27) * 0x94D049BB133111EB % 2**64
    return number ^ number >> 31


def wtinylfu_by_lists(capacity, keys):
    """The window a hundredth, counters in a dictionary by row and place."""
    limit = max(1, capacity // 100)
    window, main, hits = [], Segments((capacity - limit) * 4 // 5), []
    width = max(16, 1 << (capacity - 1).bit_length())
    counters, added = {}, 0

    def cells(key):
        return [(row, splitmix((key + 0x9E3779B97F4A7C15 * (row + 1)) % 2**64) % width) for row in range(4)]

    def uses(key):
        return min(counters.get(cell, 0) for cell in cells(key))

    for key in keys:
        hits.append(key in window or key in main)
        num_resident = len(window) + len(main.probation) + len(main.protected)
        if not hits[-1] and num_resident == capacity:
            if len(window) < limit or not (main.probation or main.protected):
                main.remove(main.victim()) if main.probation or main.protected else window.pop(0)
            elif uses(window[0]) > uses(main.victim()):
                main.remove(main.victim())
                main.probation.append(window.pop(0))
            else:
                window.pop(0)
        for cell in cells(key):
            counters[cell] = min(15, counters.get(cell, 0) + 1)
        added += 1
        if added == 10 * capacity:
            counters, added = {cell: count // 2 for cell, count in counters.items()}, added // 2
        if key in main:
            main.hit(key)
            continue
        if key in window:
            window.remove(key)
        window.append(key)
        if len(window) > limit:
            main.probation.append(window.pop(0))
    return hits


def gdsf_by_search(capacity, keys):
    """All costs and sizes alike: priority is L + uses. A new object's L is that of before the eviction for it."""
    held, inflation, hits = {}, 0.0, []
    for clock, key in enumerate(keys):
        before = inflation
        hits.append(key in held)
        if not hits[-1] and len(held) == capacity:
            victim = min(held, key=lambda other: held[other][:2])
            inflation = held.pop(victim)[0]
        num_uses = held[key][2] + 1 if hits[-1] else 1
        held[key] = ((inflation if hits[-1] else before) + num_uses, clock, num_uses)
    return hits


def lrfu_by_sums(capacity, keys):
    """Every use since the insertion counts 2^(-age / half-life), summed anew at each victim; half-life 4 * capacity."""
    held, hits = {}, []
    for clock, key in enumerate(keys):
        hits.append(key in held)
        if not hits[-1] and len(held) == capacity:
            sums = {other: sum(2 ** ((use - clock) / (4 * capacity)) for use in uses) for other, uses in held.items()}
            del held[min(held, key=lambda other: (sums[other], held[other][-1]))]
        held.setdefault(key, []).append(clock)
    return hits


OTHERS = {
    "sieve": sieve_by_a_list, "arc": arc_by_the_paper, "twoq": twoq_by_the_paper, "slru": slru_by_lists,
    "wtinylfu": wtinylfu_by_lists, "gdsf": gdsf_by_search, "prefix_reuse": lrfu_by_sums,
}  # fmt: skip
