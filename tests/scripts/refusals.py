"""How commands refuse bad input."""


def assert_refused(result, message):
    """One line that says what is wrong, exit status 2, nothing on stdout."""
    status, out, err = result
    lines = [line for line in err.splitlines() if not line.startswith("loading")]
    assert (status, out, len(lines)) == (2, "", 1), err
    assert lines[0].startswith("error: ")
    assert message in lines[0]
