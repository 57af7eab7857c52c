"""Where training libraries take onchip's ops: one module for each library, which imports it."""
