"""What the CPU and the CUDA platform need to differ in, and nowhere else."""
