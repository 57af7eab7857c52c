"""Parts of the Triton kernels: launches, maths, tiles of products."""
