"""How schedules are run in real time.

`sweep`
    One sweep: what it holds in fast memory, push and pull.
`loop`
    The loop that performs actions, and what each of them does; `adjoints` and
    `accounts` are parts of it.
`protocols`
    What a sweep asks of others.
`transfers`
    What actions do with stores.
`recovery`
    How a lost state is computed again, and how a step is found that returned
    another state than the first.
`ledger`
    Counts and timeline.
`occupied`
    Which sweep is in progress in which store.

`multistage.execute.executor` puts them together for chains of NumPy states, and
`multistage.torch.chains.runner` for the stages of a PyTorch chain.
"""
