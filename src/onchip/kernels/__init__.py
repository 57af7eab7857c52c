"""What kernels are made of, by language."""
