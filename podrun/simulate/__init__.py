"""And a thousand of them? The decisions of podrun in virtual time.

`engine` orders events by an integer clock; `queues`, `traces` and `commands.simulate` answer what a queue does with the
jobs of a log; `rates`, `campaign` and `commands.chaos` what failures cost a job of a POD; `scaling` what a larger POD
gives. What decides is podrun's own: the allocator and its queue, the recovery coordinator, the checkpoint policy. No
clock, no thread and no process may enter; all that is random comes from `streams`.
"""
