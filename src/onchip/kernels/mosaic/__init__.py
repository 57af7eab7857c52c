"""What Mosaic GPU kernels are made of: a persistent product and its register layouts."""
