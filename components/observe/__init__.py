"""Watches over a run: metrics and their page, training dynamics, guards, replicas, stragglers, hangs."""
