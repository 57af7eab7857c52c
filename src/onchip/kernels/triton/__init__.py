"""What Triton kernels are made of: launches, maths, tiles of products."""
