"""How schedules are run in real time.

`sweep`
    One sweep: what it holds in fast memory, and the loop that performs actions, push and
    pull; what it asks of slow tiers.
`ledger`
    Counts and timeline.
`transfers`
    What actions do with stores, and how a lost state is computed again.
`late`
    What is done about a tier that is late.
`metered`
    A chain whose steps are timed and weighed one by one.

`multistage.execute.executor` puts them together for chains of NumPy states, and
`multistage.torch.chains.runner` for the stages of a PyTorch chain.
"""
