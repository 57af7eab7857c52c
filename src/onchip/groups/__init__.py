"""The engine of grouped products: one product for each group of rows, whose sizes the device knows."""
