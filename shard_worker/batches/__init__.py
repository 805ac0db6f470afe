"""Steps of several sessions as one: what waits for a device, what makes the next batch, and when it is launched.

`step_batches` computes them on the device's thread. `waiting_steps` says what comes next, `prepared_steps` keeps what
is ready before it comes, `batches_away` says whether to wait for what other stages of a chain compute, and `stepping`
what a session is to all of them. The room owns the steps that wait and those on the device. It must not know where
steps come from, nor what becomes of their results.
"""
