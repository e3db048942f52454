"""The two ways in which a plan can be bad."""


class PlanError(ValueError):
    """A plan that breaks a rule: one line says what, where and what was expected."""


class Deadlock(PlanError):
    """A plan whose stages would wait for each other forever."""
