"""The plain twin of `native/joint*.c` but the program: judge, improve and cross plans alike."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from multistage.model.tier import Tier
from multistage.planners.chain.joint_core import (
    ADVANCE,
    APART,
    KEEPS_TAPE,
    MAY_STATE,
    MAY_TAPE,
    NEVER,
    RESERVE_AT,
    REVERSE,
    STARTS,
    STATE_AWAY,
    TAPE,
    TAPE_AWAY,
    TAPE_LAST,
    UNBOUNDED,
    Laid,
    Node,
    Program,
    Thing,
    may_travel,
)
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import INFEASIBLE, Table
from multistage.support.arrays import Bytes
from oracles.joint_program_twin import solve

# As in joint.c.
_MORE_SLOTS, _MOST_TRIES = 4, 48
_OPS = 1 << 20
_WORD = (1 << 64) - 1
_TRACE_OPS = 1 << 18  # as in joint_work.h

Operation = tuple[int, int, int]  # need, kind, stage


class Twin:
    """What `joint_core.Core` is, in plain Python; parameters as there."""

    def __init__(
        self, true: Sizes, table: Table, unit_bytes: float, limit: int, rates: Tier
    ) -> None:
        self.n, self.table, self.true, self.unit = len(true), table, true, unit_bytes
        self.limit, self.rates = limit, rates
        self.may = [int(bits) for bits in may_travel(true, rates)]
        self._traces: dict[tuple[int, int, int], list[Operation] | None] = {}
        self._rooms: dict[tuple[int, int, int], int] = {}

    def judge(self, fates: Bytes) -> float:
        """Return the makespan of a plan, infinite if it does not fit."""
        laid = self._laid(fates)
        return math.inf if laid is None else laid.seconds

    def lay_out(self, fates: Bytes) -> Laid:
        """Return a plan that fits as operations and things."""
        laid = self._laid(fates)
        assert laid is not None
        return laid

    def program(self, program: Program, shares: tuple[float, ...]) -> list[Bytes]:
        """Return the plans that the dynamic program finds best for shares of the limit."""
        place = self.true, self.table, self.unit, self.limit, self.rates, self.may
        return solve(*place, program, shares)

    def improve(self, fates: Bytes, seconds: float, moves: int, seed: int) -> tuple[Bytes, float]:
        """Return the best plan that so many random moves find, and its makespan."""
        draw = Draw((seed * 0x9E3779B97F4A7C15 + 1) & _WORD)
        now, best = seconds, seconds
        current, better = fates.copy(), fates.copy()
        for k in range(moves):
            left = 1 - k / moves
            allowed = 0.006 * seconds * left * left
            other = current.copy()
            if not move(other, self.n, draw):
                continue
            found = self.judge(other)
            luck = draw.below(1 << 20) / (1 << 20)
            if not (found <= now or found - now < allowed * luck * luck):
                continue
            now, current = found, other
            if now < best - 1e-12 * seconds:
                best, better = now, other.copy()
        return better, best

    def cross(self, first: Bytes, rest: Bytes, below: float) -> list[tuple[float, Bytes]]:
        """Return the plans faster than `below` that begin as one plan and continue as another."""
        made = []
        for cut in np.flatnonzero(first != rest)[1:]:
            plan = np.concatenate((first[:cut], rest[cut:]))
            seconds = self.judge(plan)
            if seconds < below:
                made.append((seconds, plan))
        return made

    # ---------------------------------------------------------------- traces

    def _trace(self, s: int, t: int, m: int) -> list[Operation] | None:
        key = s, t, m
        if key not in self._traces:
            self._traces[key] = operations(self.true, self.table, s, t, m)
        return self._traces[key]

    def _slots_within(self, s: int, t: int, room: int) -> int:
        if room <= 0:
            return INFEASIBLE
        key = s, t, room
        if key not in self._rooms:
            self._rooms[key] = self._look(s, t, room)
        return self._rooms[key]

    def _look(self, s: int, t: int, room: int) -> int:
        values = self.table.values(s, t)
        most = min(self.table.slots, int(room / self.unit + _MORE_SLOTS))
        for m in range(most, max(-1, most - _MOST_TRIES), -1):
            if not values[m] < np.inf:
                break
            trace = self._trace(s, t, m)
            if trace and max(need for need, _, _ in trace) <= room:
                return m
        return INFEASIBLE

    # ---------------------------------------------------------------- layout

    def _nodes(self, fates: list[int]) -> list[Node]:
        nodes: list[Node] = []
        i, n = 0, self.n
        while i < n:
            tape = bool(fates[i] & KEEPS_TAPE)
            away = i > 0 and fates[i - 1] & TAPE_AWAY and self.may[i - 1] & MAY_TAPE
            last = nodes[-1] if nodes else None
            apart = last is not None and (not last.tape or bool(fates[i] & APART and away))
            stop = i
            while not tape and stop + 1 < n and not fates[stop + 1] & (STARTS | KEEPS_TAPE):
                stop += 1
            nodes.append(Node(i, stop, 0, apart, tape))
            i = stop + 1
        return nodes

    def _laid(self, array: Bytes) -> Laid | None:
        fates = [int(fate) for fate in array]
        plan = _Layout(self, fates)
        if not plan.lay_reverse(fates):
            return None
        moved = plan.arrange()
        if moved is None:
            return None
        seconds, waited_s = plan.run(moved)
        return Laid(
            operations=[(kind, stage) for _, kind, stage in plan.ops],
            things=plan.things,
            nodes=plan.nodes,
            moved=moved,
            turn=plan.turn,
            peak_bytes=plan.peak,
            seconds=seconds,
            waited_s=waited_s,
        )


class _Layout:
    """A plan being judged; the functions of joint.c by their names there."""

    def __init__(self, twin: Twin, fates: list[int]) -> None:
        self.twin, self.true = twin, twin.true
        self.nodes = twin._nodes(fates)
        self.ops: list[Operation] = []
        self.things: list[Thing] = []
        self.again: list[int] = []
        self.used: list[int] = []
        self.turn = self.peak = 0
        count = len(self.nodes)
        self.own, self.input, self.left = [-1] * count, [-1] * count, [0] * count
        self._lay_forward(fates)
        sizes = [self._bytes(thing) for thing in self.things]
        self.before = [0, *(int(x) for x in np.cumsum(np.array(sizes, object)))] if sizes else [0]

    def _bytes(self, thing: Thing) -> int:
        return int((self.true.tape if thing.tape else self.true.state)[thing.step])

    def _thing(self, tape: bool, step: int) -> int:
        self.things.append(Thing(tape, step, len(self.ops) - 1, NEVER, NEVER, 0, 0))
        self.again.append(0)
        self.used.append(len(self.ops))
        return len(self.things) - 1

    def _lay_forward(self, fates: list[int]) -> None:
        true, may, count = self.true, self.twin.may, len(self.nodes)
        held, last_gradient = 0, int(true.gradient[-1])
        for k, node in enumerate(self.nodes):
            s = node.start
            if node.apart:
                if fates[s] & STATE_AWAY and may[s] & MAY_STATE and k < count - 1:
                    self.input[k] = self._thing(False, s)
                else:
                    held += int(true.state[s])
                    if self.own[k - 1] >= 0:
                        self.again[self.own[k - 1]] = int(true.state[s])
            elif k:
                self.input[k] = self.own[k - 1]
            self.left[k] = held
            if k == count - 1:
                return
            if node.tape:
                tape = int(true.tape[s])
                self.ops.append((held + tape + int(true.taping[s]) + last_gradient, TAPE, s))
                if fates[s] & TAPE_AWAY and may[s] & MAY_TAPE:
                    self.own[k] = self._thing(True, s)
                else:
                    held += tape
                self.left[k] = held
                continue
            for j in range(s, node.stop + 1):
                need = held + last_gradient + (0 if j == s else int(true.state[j]))
                self.ops.append((need + int(true.state[j + 1]) + int(true.advance[j]), ADVANCE, j))

    def _lay_segment(self, k: int, reserve: int) -> bool:
        node, twin, before = self.nodes[k], self.twin, self.before
        held = self._bytes(self.things[self.input[k]]) if self.input[k] >= 0 else 0
        room = twin.limit - self.left[k] - held
        after = max(0, self.input[k])
        if self.input[k] < 0:
            for j in range(k - 1, -1, -1):
                after = (self.own[j] if self.own[j] >= 0 else self.input[j]) + 1
                if after:
                    break
        slots = INFEASIBLE
        for r in range(reserve, -1, -1):
            kept = before[after] - before[max(0, after - r)]
            slots = twin._slots_within(node.start, node.stop, room - kept)
            if slots != INFEASIBLE:
                break
        if slots == INFEASIBLE:
            return False
        trace = twin._trace(node.start, node.stop, slots)
        assert trace is not None
        if len(self.ops) + len(trace) > _OPS - 4 * twin.n:
            return False
        self.nodes[k] = replace(node, slots=slots)
        self.ops += [(need + self.left[k], kind, stage) for need, kind, stage in trace]
        return True

    def lay_reverse(self, fates: list[int]) -> bool:
        true = self.true
        first, last = [0] * len(self.things), [0] * len(self.things)
        for k in range(len(self.nodes) - 1, -1, -1):
            node, start = self.nodes[k], len(self.ops)
            last_node = k == len(self.nodes) - 1
            s = node.start
            if node.tape and not last_node:
                need = self.left[k] + int(true.gradient[s + 1]) + int(true.gradient[s])
                self.ops.append((need + int(true.reverse[s]), REVERSE, s))
            elif not self._lay_segment(k, fates[s] >> RESERVE_AT & 3):
                return False
            stop = len(self.ops) - 1
            if last_node:
                while self.ops[start][1] != REVERSE:
                    start += 1
                self.turn = start
                if self.input[k] >= 0:
                    self.used[self.input[k]] = NEVER
            if self.input[k] >= 0:
                first[self.input[k]] = start
                if node.apart:
                    last[self.input[k]] = stop
            if self.own[k] >= 0:
                last[self.own[k]] = stop
                if self.nodes[k + 1].apart:
                    first[self.own[k]] = start
        self.things = [
            replace(thing, first=f, last=g)
            for thing, f, g in zip(self.things, first, last, strict=True)
        ]
        return True

    # ------------------------------------------------------------------ bytes

    def _read_back(self) -> tuple[list[int], list[int]] | None:
        things, before, turn = self.things, self.before, self.turn
        cut, request = [0] * len(self.ops), [0] * len(self.ops)
        k = len(things)
        for q in range(turn, len(self.ops)):
            while k and things[k - 1].last < q:
                k -= 1
            cut[q] = k
            request[q] = self.ops[q][0] + before[k] - self.twin.limit
        soonest, low = [0] * len(things), turn
        for i in range(len(things) - 1, -1, -1):
            q = max(things[i].first, turn)
            for z in range(q, things[i].last + 1):
                if request[z] > before[i] and cut[z] > i:
                    return None
            while q > low and request[q - 1] <= before[i]:
                q -= 1
            soonest[i] = low = q
        return cut, soonest

    def arrange(self) -> int | None:
        found = self._read_back()
        if found is None:
            return None
        cut, soonest = found
        things, before, limit = self.things, self.before, self.twin.limit
        evicted, got = [NEVER] * len(things), [NEVER] * len(things)
        resident = gone = made = most = 0
        for q, (need, _, _) in enumerate(self.ops):
            back = q >= self.turn
            top = cut[q] if back else made
            if back:
                resident = before[max(top, gone)] - before[gone]
            while need + resident > limit:
                if gone >= top or self.used[gone] >= q:
                    return None
                evicted[gone] = q
                resident -= self._bytes(things[gone]) - (0 if back else self.again[gone])
                gone += 1
            most = max(most, gone)
            while back and gone and soonest[gone - 1] <= q:
                gone -= 1
                got[gone] = q
                resident += self._bytes(things[gone])
            if need + resident > limit:
                return None
            self.peak = max(self.peak, need + resident)
            while made < len(things) and things[made].made == q:
                resident += self._bytes(things[made]) - self.again[made]
                made += 1
        capacity = self.twin.rates.capacity_bytes
        if before[most] > (UNBOUNDED if capacity is None else capacity):
            return None
        self.things = [
            replace(thing, evicted=e, got=g)
            for thing, e, g in zip(things, evicted, got, strict=True)
        ]
        return most

    # ------------------------------------------------------------------ clock

    def run(self, moved: int) -> tuple[float, float]:
        true, things, rates = self.true, self.things, self.twin.rates
        written, landed = [0.0] * moved, [0.0] * moved
        evict, get, wait, put = 0, moved - 1, len(things) - 1, 0
        now = stalled = 0.0
        free = [0.0, 0.0]
        reading = 0 if rates.shared else 1
        for q, (_, kind, stage) in enumerate(self.ops):
            while evict < moved and things[evict].evicted == q:
                if written[evict] > now:
                    stalled += written[evict] - now
                    now = written[evict]
                evict += 1
            while get >= 0 and things[get].got == q:
                free[reading] = max(now, free[reading]) + rates.reading_s(self._bytes(things[get]))
                landed[get] = free[reading]
                get -= 1
            while q >= self.turn and wait >= 0 and things[wait].first <= q:
                if wait < moved:
                    if landed[wait] > now:
                        stalled += landed[wait] - now
                        now = landed[wait]
                    now += rates.read_overhead_s
                wait -= 1
            if kind == REVERSE:
                now += float(true.reverse_s[stage])
            else:
                now += float(true.forward_s[stage])
                if kind == TAPE_LAST:
                    now -= float(true.spared_s[stage])
            while put < moved and things[put].made == q:
                now += rates.write_overhead_s
                free[0] = max(now, free[0]) + rates.writing_s(self._bytes(things[put]))
                written[put] = free[0]
                put += 1
        return now, stalled


# ---------------------------------------------------------------- segments


def operations(true: Sizes, table: Table, s: int, t: int, m: int) -> list[Operation] | None:
    """Return the operations that reverse s..t within m slots, the input not counted."""
    slots = table.sizes
    out: list[Operation] = []
    stack: list[tuple[int, int, int, int]] = [(s, t, m, 0)]
    while stack:
        i, stop, have, held = stack.pop()
        if len(out) + 2 >= _TRACE_OPS:
            return None
        tape = int(true.tape[i])
        if stop < 0:
            need = held + tape + int(true.gradient[i + 1]) + int(true.gradient[i])
            out.append((need + int(true.reverse[i]), REVERSE, i))
            continue
        k = table.choice(i, stop, have)
        if k == INFEASIBLE:
            return None
        gradient = int(true.gradient[stop + 1])
        if k == i:
            kind = TAPE_LAST if i == stop else TAPE
            out.append((held + tape + gradient + int(true.taping[i]), kind, i))
            stack.append((i, -1, have, held))
            if i < stop:
                stack.append((i + 1, stop, have - int(slots.tape[i]), held + tape))
            continue
        if len(out) + k - i >= _TRACE_OPS:
            return None
        for j in range(i, k):
            need = held + gradient + (0 if j == i else int(true.state[j]))
            out.append((need + int(true.state[j + 1]) + int(true.advance[j]), ADVANCE, j))
        stack.append((i, k - 1, have, held))
        stack.append((k, stop, have - int(slots.state[k]), held + int(true.state[k])))
    return out


# ------------------------------------------------------------ random moves


class Draw:
    """Random whole numbers, as `drawn` of joint_search.c makes them."""

    def __init__(self, state: int) -> None:
        self.state = state

    def below(self, most: int) -> int:
        """Return the next number, below `most`."""
        state = self.state
        state ^= (state << 13) & _WORD
        state ^= state >> 7
        state ^= (state << 17) & _WORD
        self.state = state
        return (state >> 20) % most


def _set(fates: Bytes, i: int, mask: int, flags: int) -> None:
    fates[i] = (int(fates[i]) & ~mask & 255) | flags


def move(fates: Bytes, n: int, draw: Draw) -> bool:
    """Change a plan a little; False if the move has no place here."""
    i, kind = draw.below(n), draw.below(11)
    j = min(n - 1, i + draw.below(n if n - 1 < 8 else 9))
    each = 3 << RESERVE_AT
    match kind:
        case 0 | 1 | 2:
            fates[i] ^= (TAPE_AWAY, STATE_AWAY, STARTS)[kind]
        case 3:
            fates[i] = (int(fates[i]) ^ KEEPS_TAPE) | STARTS
            if i + 1 < n:
                fates[i + 1] |= STARTS
        case 4 | 5:
            away = (TAPE_AWAY if draw.below(2) else 0) if kind == 5 else 0
            for z in range(i, j + 1):
                if kind == 4:
                    _set(fates, z, KEEPS_TAPE | STARTS, STARTS if z == i else 0)
                else:
                    _set(fates, z, TAPE_AWAY, KEEPS_TAPE | STARTS | away)
            if j + 1 < n:
                fates[j + 1] |= STARTS
        case 6:
            _set(fates, i, each, draw.below(4) << RESERVE_AT)
        case 7:
            reserve = draw.below(4) << RESERVE_AT
            for z in range(n):
                _set(fates, z, each, reserve)
        case 8:
            both = TAPE_AWAY | STATE_AWAY
            away = both if draw.below(2) else 0
            for z in range(i, j + 1):
                _set(fates, z, both, away)
        case 9:
            far = 1 + draw.below(2)
            o = i + far if draw.below(2) else i - far
            if i < 1 or o < 1 or o >= n or not (int(fates[i]) | int(fates[o])) & STARTS:
                return False
            both = STARTS | STATE_AWAY
            mine, other = int(fates[i]) & both, int(fates[o]) & both
            _set(fates, i, both, other)
            _set(fates, o, both, mine)
        case _:
            fates[i] = (int(fates[i]) ^ APART) | STARTS
    return True
