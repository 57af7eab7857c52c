"""What every op shares and no op owns: choosing a backend."""
