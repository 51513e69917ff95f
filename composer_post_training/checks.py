"""Checks of the gradient probe: a statistic, a threshold and a status; too little data is never a pass."""

from stages.probe.checks.check import CHECKS, Check, Finding, Severity, Status, check, verdict, write_checks

__all__ = ["CHECKS", "Check", "Finding", "Severity", "Status", "check", "verdict", "write_checks"]
