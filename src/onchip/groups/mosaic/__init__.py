"""Products over groups of rows by Hopper kernels in Pallas Mosaic GPU."""
