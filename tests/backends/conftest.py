"""No test of a store may leave a thread, a descriptor or a file behind."""

from leaks import no_leak as no_leak
