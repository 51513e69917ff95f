"""Checks of the gradient probe: a statistic, a threshold and a status; too little data is never a pass."""

from composer_stages.probe.checks.check import (
    CHECKS as CHECKS,
    Check as Check,
    Finding as Finding,
    Severity as Severity,
    Status as Status,
    check as check,
    verdict as verdict,
    write_checks as write_checks,
)
