"""Training on several devices: data parallelism (`ddp`, `buckets`), a sharded optimizer (`zero`), sharded weights
(`fsdp`)."""
