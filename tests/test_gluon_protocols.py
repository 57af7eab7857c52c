"""Who waits for whom in the kernels in Gluon, which no CPU can run: models of `turns.py`, `staggered.py`
and `apart.py`.

A model does what its kernel does with barriers and slots, step by step, in a random order of its warps and of copies
under way.  It fails if a warp reads what isn't there, if a copy overwrites what is being read, or if all wait
for ever.  A change to a kernel's barriers is made here first.
"""

import random

import pytest


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and the announced copies have come."""

    def __init__(self, count=1):
        self.count, self.left, self.copies, self.phase = count, count, 0, 0

    def arrive(self, copies=0):
        assert self.left > 0, "more arrivals than a phase has"
        self.left, self.copies = self.left - 1, self.copies + copies
        self._end()

    def come(self):
        self.copies -= 1
        self._end()

    def _end(self):
        if self.left == self.copies == 0:
            self.left, self.phase = self.count, self.phase + 1

    def passed(self, parity):
        """Whether the phase of this parity is over, as far as a parity can tell."""
        return self.phase % 2 != parity


def barriers(n):
    return [Barrier() for _ in range(n)]


class Slots:
    """Memory that copies write and products read, both of which take their time."""

    def __init__(self, n, copies):
        self.content, self.readers, self.copies = [None] * n, [0] * n, copies

    def copy(self, slot, what, barrier):
        assert self.readers[slot] == 0, f"slot {slot} is overwritten while it is read"
        self.content[slot] = "on its way"
        self.copies.append((self, slot, what, barrier))

    def read(self, slot, what):
        assert self.content[slot] == what
        self.readers[slot] += 1

    def release(self, slot):
        self.readers[slot] -= 1


def run(warps, copies, chance):
    """All warps to their ends, in a random order; a warp yields where it waits, and now and then."""
    for _ in range(500_000):
        if copies and chance.random() < 0.4:
            slots, slot, what, barrier = copies.pop(chance.randrange(len(copies)))
            slots.content[slot] = what
            barrier.come()
            continue
        warp = chance.choice(warps)
        try:
            for _ in range(chance.choice((1, 1, 3, 20))):
                next(warp)
        except StopIteration:
            warps.remove(warp)
            if not warps:
                return
    raise AssertionError("all wait")


def until(barrier, parity):
    while not barrier.passed(parity):
        yield


def in_turns(columns, steps, still_blocks, n_slots, chance):
    """`turns.copy` and two of `turns.multiply`, for columns of so many tiles; gives the order of what is stored."""
    copies, stored = [], []
    still, slots = Slots(still_blocks, copies), Slots(n_slots, copies)
    full, empty, turn, store_turn = barriers(n_slots), barriers(n_slots), barriers(2), barriers(2)
    still_full, still_empty = Barrier(), Barrier(2)

    def copy():
        at = step = 0
        for n, tiles in enumerate(columns):
            yield from until(still_empty, n % 2 ^ 1)
            still_full.arrive(copies=still_blocks)
            for b in range(still_blocks):
                still.copy(b, (n, b), still_full)
            for half in range(2 * tiles):
                for k in range(steps):
                    yield from until(empty[at % n_slots], at // n_slots % 2 ^ 1)
                    full[step % n_slots].arrive(copies=2 if k >= still_blocks else 1)
                    if k >= still_blocks:
                        slots.copy(at % n_slots, (n, k), full[step % n_slots])
                        at += 1
                        yield from until(empty[at % n_slots], at // n_slots % 2 ^ 1)
                    slots.copy(at % n_slots, (n, half, k), full[step % n_slots])
                    at, step = at + 1, step + 1
                    yield

    def multiply(w):
        mine = 0
        for n, tiles in enumerate(columns):
            yield from until(still_full, n % 2)
            for j in range(tiles):
                more = max(steps - still_blocks, 0)
                begin, step = (2 * mine + w) * (steps + more), (2 * mine + w) * steps
                yield from until(turn[w], mine % 2 ^ (w == 0))
                reading = []
                for k in range(steps):
                    at = begin + k + max(k - still_blocks + 1, 0)
                    yield from until(full[(step + k) % n_slots], (step + k) // n_slots % 2)
                    slots.read(at % n_slots, (n, 2 * j + w, k))
                    other = (slots, (at - 1) % n_slots) if k >= still_blocks else (still, k)
                    other[0].read(other[1], (n, k))
                    reading.append(((slots, at % n_slots), other))
                    yield
                    if k > 0:
                        for where, slot in reading.pop(0):
                            where.release(slot)
                        before = at - (2 if k >= still_blocks else 1)
                        empty[before % n_slots].arrive()
                        if k > still_blocks:
                            empty[(before - 1) % n_slots].arrive()
                turn[1 - w].arrive()
                yield
                for where, slot in reading.pop(0):
                    where.release(slot)
                end = begin + steps - 1 + more
                empty[end % n_slots].arrive()
                if steps > still_blocks:
                    empty[(end - 1) % n_slots].arrive()
                if j == tiles - 1:
                    still_empty.arrive()
                yield from until(store_turn[w], mine % 2 ^ (w == 0))
                stored.append((mine, w))
                yield
                store_turn[1 - w].arrive()
                mine += 1

    run([copy(), multiply(0), multiply(1)], copies, chance)
    return stored


# Of steps, blocks that stay, and slots: as `launches` cuts them, with fewer steps than blocks, and with a single one.
@pytest.mark.parametrize(
    "cut", [(9, 9, 4), (10, 6, 7), (12, 5, 8), (14, 4, 9), (1, 1, 12), (2, 2, 11), (1, 4, 10), (3, 4, 10), (50, 4, 10)]
)
def test_two_groups_in_turns(cut):
    for seed in range(12):
        chance = random.Random(seed)
        columns = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
        stored = in_turns(columns, *cut, chance)
        assert stored == [(n, w) for n in range(sum(columns)) for w in (0, 1)]


def staggered(tiles, steps, stages, lag, chance):
    """`staggered.copy` and two of `staggered.multiply`; gives how far the first group was ahead, in steps, at most."""
    copies, ahead, at = [], [], [0, 0]
    slots = Slots(stages, copies)
    full, empty, behind = barriers(stages), [Barrier(2) for _ in range(stages)], Barrier()

    def copy():
        for step in range(tiles * steps):
            yield from until(empty[step % stages], step // stages % 2 ^ 1)
            full[step % stages].arrive(copies=1)
            slots.copy(step % stages, step, full[step % stages])
            yield

    def multiply(w):
        for tile in range(tiles):
            step = tile * steps
            if w == 1 and tile == 0:
                yield from until(behind, 0)
            for k in range(steps):
                yield from until(full[(step + k) % stages], (step + k) // stages % 2)
                slots.read((step + k) % stages, step + k)
                at[w] = step + k
                ahead.append(at[0] - at[1])
                if w == 0 and tile == 0 and k == lag:
                    behind.arrive()
                yield
                if k > 0:
                    slots.release((step + k - 1) % stages)
                    empty[(step + k - 1) % stages].arrive()
            slots.release((step + steps - 1) % stages)
            empty[(step + steps - 1) % stages].arrive()
            yield

    run([copy(), multiply(0), multiply(1)], copies, chance)
    return max(ahead)


def test_two_groups_of_a_tile():
    for seed in range(60):
        chance = random.Random(seed)
        assert staggered(chance.randint(1, 5), chance.choice((3, 15, 16)), 4, 2, chance) >= 2


def apart(steps_of, programs, stages, chance):
    """`apart.copy_tiles` and `apart.multiply_tiles`, as `copy_rows` and `multiply_rows`, in so many programs, for tiles
    of these steps; gives those done.
    """
    copies, done, counter, warps = [], [], [0], []

    def program(first):
        slots = Slots(stages, copies)
        full, empty, told, heard, said = barriers(stages), barriers(stages), barriers(2), barriers(2), [None, None]

        def tell(n, tile):
            yield from until(heard[n % 2], n // 2 % 2 ^ 1)
            said[n % 2] = tile
            told[n % 2].arrive()

        def copy():
            step, n, tile = 0, 0, first
            while tile < len(steps_of):
                yield from tell(n, tile)
                n += 1
                for k in range(max(steps_of[tile], 1)):
                    yield from until(empty[step % stages], step // stages % 2 ^ 1)
                    full[step % stages].arrive(copies=1)
                    slots.copy(step % stages, (tile, k), full[step % stages])
                    step += 1
                    yield
                tile, counter[0] = counter[0] + programs, counter[0] + 1
            yield from tell(n, len(steps_of))

        def multiply():
            step = n = 0
            while True:
                yield from until(told[n % 2], n // 2 % 2)
                tile = said[n % 2]
                heard[n % 2].arrive()
                n += 1
                if tile == len(steps_of):
                    return
                for k in range(max(steps_of[tile], 1)):
                    yield from until(full[step % stages], step // stages % 2)
                    slots.read(step % stages, (tile, k))
                    yield
                    if k > 0:
                        slots.release((step - 1) % stages)
                        empty[(step - 1) % stages].arrive()
                    step += 1
                slots.release((step - 1) % stages)
                empty[(step - 1) % stages].arrive()
                done.append(tile)

        warps.extend([copy(), multiply()])

    for first in range(programs):
        program(first)
    run(warps, copies, chance)
    return done


def test_tiles_that_programs_take():
    for seed in range(60):
        chance = random.Random(seed)
        steps_of = [chance.choice((0, 1, 2, 3, 5, 9)) for _ in range(chance.randint(1, 14))]
        assert sorted(apart(steps_of, chance.randint(1, 4), 4, chance)) == [*range(len(steps_of))]


def units(work, stages, chance):
    """The vocabulary's `apart.copy` and `apart.multiply`, for units of so many steps that are wide or tall; gives what
    was multiplied.
    """
    copies, done = [], []
    slots = Slots(3 * stages, copies)
    full, empty = barriers(stages), barriers(stages)

    def copy():
        step = 0
        for u, (wide, steps) in enumerate(work):
            for k in range(steps):
                s = step % stages
                yield from until(empty[s], step // stages % 2 ^ 1)
                full[s].arrive(copies=3)
                names = ("rows", "left", "right") if wide else ("rows", "next rows", "columns")
                for b, name in enumerate(names):
                    slots.copy(3 * s + b, (u, k, name), full[s])
                step += 1
                yield

    def multiply():
        step = 0
        for u, (wide, steps) in enumerate(work):
            reading = []
            for k in range(steps):
                s = step % stages
                yield from until(full[s], step // stages % 2)
                pairs = (3 * s, 3 * s + 2 - wide), (3 * s + 1 - wide, 3 * s + 2)
                names = (
                    (("rows", "left"), ("rows", "right")) if wide else (("rows", "columns"), ("next rows", "columns"))
                )
                for pair, of_pair in zip(pairs, names, strict=True):
                    for slot, name in zip(pair, of_pair, strict=True):
                        slots.read(slot, (u, k, name))
                        reading.append(slot)
                    yield
                if k > 0:  # all but this step's
                    for slot in reading[:4]:
                        slots.release(slot)
                    reading = reading[4:]
                    empty[(step + stages - 1) % stages].arrive()
                step += 1
            for slot in reading:
                slots.release(slot)
            yield
            empty[(step - 1) % stages].arrive()
            done.append(u)

    run([copy(), multiply()], copies, chance)
    return done


def test_units_of_two_products():
    for seed in range(60):
        chance = random.Random(seed)
        work = [(chance.randrange(2), chance.choice((1, 2, 3, 4, 5, 13))) for _ in range(chance.randint(1, 8))]
        assert units(work, 4, chance) == [*range(len(work))]
