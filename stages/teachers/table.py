"""One row of the teacher table."""

from pydantic import Field

from stages.policy import PolicyConfig


class TeacherConfig(PolicyConfig):
    """One teacher: a name and a policy. By default its most likely answer is asked for; how long it may be is said."""

    name: str
    temperature: float = Field(0.0, ge=0.0)
    max_tokens: int = Field(gt=0)
    """Longest answer in tokens. There is no default: an answer that is cut off is paid for and of no use."""
    concurrency: int = Field(32, gt=0, json_schema_extra={"affects_results": False})
    """Most requests in flight at once to a server; how many it gets is found out."""
    batch_price: float = Field(0.5, gt=0.0, le=1.0)
    """What an answer in a batch costs, as a share of the price of a single one."""
    batch_poll_s: float = Field(30.0, gt=0.0, json_schema_extra={"affects_results": False})
    """Seconds between two looks at a batch."""
