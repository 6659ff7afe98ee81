"""How long the campaign takes, or which case it runs."""

from __future__ import annotations


def pytest_addoption(parser):
    parser.addoption("--minutes", type=float, help="run random cases for as long, all together")
    parser.addoption("--seed", type=int, help="run this case of each part alone")
