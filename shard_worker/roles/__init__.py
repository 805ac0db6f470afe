"""What a worker can be, one file each: a stage of the target, a draft."""
