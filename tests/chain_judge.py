"""A plain judge of schedules of a chain with a tier: data at hand, bytes and seconds."""

from multistage.actions import (
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)


class Judge:
    """Replays actions; `slower` multiplies the times of writes and of reads."""

    def __init__(self, costs, rates, slower=(1.0, 1.0)):
        self.costs, self.rates, self.slower = costs, rates, slower
        self.saved, self.tapes, self.landing = set(), set(), set()
        self.pinned = set()  # inputs of tapes, apart from the tape before
        self.late = set()  # tapes made in the reverse sweep, which hold their inputs
        self.live, self.adjoint = 0, None
        self.now = self.waited = 0.0
        self.busy = [0.0, 0.0]
        self.done, self.tokens = {}, []
        self.tier, self.tier_peak, self.peak, self.ended = set(), 0, 0, False

    def state(self, i):
        if i == 0:
            return self.costs.input_bytes
        return self.costs.stages[i - 1].output_bytes

    def gradient(self, i):
        if i is None:
            return 0
        return self.costs.stages[i - 1].gradient_bytes if i else self.costs.input_gradient_bytes

    def of(self, i, name):
        return getattr(self.costs.stages[i], name)

    def size(self, thing):
        i, tape = thing
        return self.of(i, "tape_bytes") if tape else self.state(i)

    def resident(self):
        held = set(self.tapes) | {i for i, tape in self.landing if tape}
        states = self.saved | self.pinned | {i for i, tape in self.landing if not tape} | {0}
        if self.live is not None:
            states.add(self.live)
        inside = {i + 1 for i in self.tapes}
        total = sum(self.state(i) for i in states if i not in inside or i == 0)
        return total + sum(self.of(i, "tape_bytes") for i in held) + self.gradient(self.adjoint)

    def at_peak(self, more=0):
        self.peak = max(self.peak, self.resident() + more)

    def transfer(self, thing, direction):
        nbytes = self.size(thing)
        took = (self.rates.writing_s, self.rates.reading_s)[direction](nbytes) * self.slower[
            direction
        ]
        channel = 0 if self.rates.shared else direction
        self.busy[channel] = max(self.now, self.busy[channel]) + took
        self.done[thing, direction] = self.busy[channel]
        self.tokens.append((thing, direction))

    def wait(self, until):
        if until > self.now:
            self.waited += until - self.now
            self.now = until

    def at_hand(self, i):
        held = self.saved | self.pinned | {0, self.live}
        return i in held or i - 1 in self.tapes

    def run(self, actions):
        for index, action in enumerate(actions):
            assert self.apply(action) is None, (index, action)
            if not isinstance(action, Reverse):  # before whose end the input may be gone
                self.at_peak()
        assert self.adjoint == 0 and not self.saved and not self.tapes and not self.tier
        assert not self.landing and self.ended
        return self

    def apply(self, action):
        match action:
            case Advance(start, stop):
                for i in range(start, stop):
                    assert self.live == i, action
                    self.at_peak(self.state(i + 1) + self.of(i, "forward_overhead_bytes"))
                    self.now += self.of(i, "forward_s")
                    self.live = i + 1
            case Tape(i):
                assert self.live == i and i not in self.tapes, action
                self.at_peak(self.of(i, "tape_bytes") + self.of(i, "tape_overhead_bytes"))
                self.tapes.add(i)
                if self.ended:
                    self.late.add(i)
                if self.ended or i - 1 not in self.tapes:
                    self.pinned.add(i)
                self.now += self.of(i, "forward_s")
                if self.adjoint == i + 1:
                    self.now -= self.of(i, "spared_s")
                self.live = i + 1
            case Reverse(i):
                assert self.ended and i == self.adjoint - 1, action
                if i not in self.tapes:
                    self.apply(Tape(i))
                if self.live == i + 1:
                    self.live = None
                assert self.at_hand(i), action
                spared = self.of(i, "spared_bytes") if i + 1 not in self.saved else 0
                needed = not i or self.of(i, "saves_input") or self.of(i, "way")
                if not needed and i not in self.saved:
                    spared += self.of(i - 1, "spared_bytes")
                self.at_peak(self.gradient(i) + self.of(i, "backward_overhead_bytes") - spared)
                self.tapes.remove(i)
                self.pinned.discard(i)
                self.adjoint = i
                self.now += self.of(i, "backward_s")
            case Save(i):
                assert self.live == i and i not in self.saved, action
                self.saved.add(i)
            case Load(i):
                assert i == 0 or i in self.saved or i - 1 in self.tapes, action
                self.live = i
            case Free(i):
                self.saved.remove(i)
            case Put(i, _, tape):
                assert i in (self.tapes - self.late if tape else self.saved), action
                self.now += self.rates.write_overhead_s
                self.transfer((i, tape), 0)
                self.tier.add((i, tape))
                self.tier_peak = max(self.tier_peak, sum(map(self.size, self.tier)))
            case Evict(i, _, tape):
                self.wait(self.done[(i, tape), 0])
                (self.tapes if tape else self.saved).remove(i)
                if i not in self.late:
                    self.pinned.discard(i)  # gone with its tape, or to the tier
            case Get(i, _, tape):
                assert (i, tape) in self.tier and i not in (self.tapes if tape else self.saved)
                self.transfer((i, tape), 1)
                self.landing.add((i, tape))
            case Await(token):
                thing, direction = self.tokens[token]
                assert direction == 1 and thing in self.landing, action
                self.wait(self.done[thing, direction])
                self.now += self.rates.read_overhead_s
                self.landing.remove(thing)
                (self.tapes if thing[1] else self.saved).add(thing[0])
            case Drop(i, _, tape):
                self.tier.remove((i, tape))
            case EndForward():
                assert self.live == len(self.costs.stages) and not self.ended
                self.at_peak(self.gradient(self.live))
                self.ended, self.adjoint, self.live = True, self.live, None
            case _:
                raise AssertionError(action)
