"""One request's session on one stage: its steps in order, what is passed on, what comes back.

`session` and `device_session` hold what every stage does on the event loop and on the device thread, `relay` what all
but the last one do, `last_stage` what the last one does. `following` lets steps follow each other without the
coordinator, `prelaunch` starts them early on a GPU, `checks` refuses what does not fit, and `background` runs what
nobody waits for. The room owns positions and step numbers. It must not know how layers compute.
"""
