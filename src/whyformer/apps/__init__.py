"""What users touch: the command line, the web page, the report. Thin; none of them imports another."""

DEFAULT_MODEL = {"image": "bundled:digits", "text": "bundled:sst2", "both": "bundled:reader"}
"""What explains an input of that kind where no model was named."""
ANSWER_METHOD = "attnlrp"
"""What explains an answer where no method was named."""


def is_local(host: str) -> bool:
    """Whether only this machine can reach what listens there."""
    import ipaddress  # not at the top: every command reads this file

    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
