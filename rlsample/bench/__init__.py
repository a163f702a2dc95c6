"""Measurements that `rlsample bench` and docs/performance.md quote."""
