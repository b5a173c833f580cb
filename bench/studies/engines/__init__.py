"""Other engines on the workloads of `headway bench throughput`: what their figures are measured with."""
