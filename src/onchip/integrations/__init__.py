"""onchip's ops in training libraries: one module for each library, which imports that library."""
