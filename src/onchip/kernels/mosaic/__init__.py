"""Parts of the Mosaic GPU kernels: a persistent product and its register layouts."""
