"""Mistakes of users: reported by name in the worker; the next save works, and nothing stays locked."""

NAMES = ("save", "load", "wait", "prepare")


def test_a_mistake_of_a_script_is_reported_and_the_next_save_works(new_job):
    job = new_job()
    job.start(program="misuse.py", restarts=0)
    assert job.wait() == 0, job.text()
    told = {path.name: path.read_text() for path in job.folder.glob("*.[01]")}
    where = "fastckpt: state['layers'][0]['extra'], a "
    cannot = "cannot be saved; leave it out, or save plain values or tensors in its place"
    raised = {
        "property": f"ZeroDivisionError: the user's own error | {where}__main__.Opaque, {cannot}",
        "lock": f"TypeError: cannot pickle '_thread.lock' object | {where}_thread.lock, {cannot}",
        "generator": f"TypeError: cannot pickle 'generator' object | {where}builtins.generator, {cannot}",
        "tensor": f"RuntimeError: the tensor's own error | {where}__main__.Subclass, {cannot}",
    }
    for name, text in raised.items():
        assert told[f"{name}.0"] == text
    assert told["lambda.0"].startswith("AttributeError: Can't pickle local object 'Worker.run.<locals>.<lambda>'")
    assert f"{where}builtins.function, {cannot}" in told["lambda.0"]
    assert all(told[f"{name}.1"] == "saved" for name in (*raised, "lambda")), (
        "its own part is in memory; it does not count"
    )
    for rank in (0, 1):
        assert "steps must not go back" in told[f"smaller.{rank}"] and "StepError" in told[f"smaller.{rank}"]
        assert told[f"twice.{rank}"] == told[f"twice-to-disk.{rank}"] == "memory already holds this step"
        for name in NAMES:
            assert "belongs to the process that made it, not to one forked from it" in told[f"forked-{name}.{rank}"]
            assert told[f"closed-{name}.{rank}"] == (
                "fastckpt.errors.FastckptError: the checkpointer is closed: nothing is saved or loaded after close(); "
                "make another"
            )
    assert [told["one-rank.0"], told["one-rank.1"]] == ["nothing", "saved"]
    assert job.stored()[0] == 140
