"""The parts of a `Reversal`: its arguments, its stores, uniform and unequal steps, its reports."""
