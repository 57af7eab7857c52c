"""The engine of FP8 products: quantising, products, cuBLASLt."""
