"""What runs on the device: model runner, sampler, memory, warm-up."""
