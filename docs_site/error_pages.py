"""The table of messages that need more than a sentence: source of docs/errors.md.

A code is never used for anything else: a new page is appended with the next number, and one whose message has gone from
the product stays, with no lines.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ErrorPage:
    """One entry.

    Attributes:
        code: As `coded` takes it.
        title: The fault in a few words.
        lines: The messages as users see them, with ``<...>`` for what differs.
        meaning: What has happened, and what the job does now.
        causes: The usual ones, the most frequent first.
        remedies: What to do, step by step.
        lost: What is lost, and what is not.
        places: The modules that end messages with the code.
    """

    code: str
    title: str
    lines: tuple[str, ...]
    meaning: str
    causes: tuple[str, ...]
    remedies: tuple[str, ...]
    lost: str
    places: tuple[str, ...]


PAGES: Sequence[ErrorPage] = (
    ErrorPage(
        "FC-001",
        "Memory is too small for checkpoints",
        (
            "<shared memory> cannot hold <slots> x <size>, <size> in all: <limit>. <remedies>.",
            "nothing can be written under <directory>: <error>; <limit>. <remedies>.",
            "nothing can be written under <directory>: <error>; <limit>. Free some of it, enlarge it (docker: "
            "--shm-size), or choose another tmpfs with --fast-shm-dir.",
            "<shared memory> holds two slots only (<limit>, less what is left to others)",
            "<what checkpoints take>: data loaders with workers, which need some of it, may fail. <remedies>.",
            "copies of other hosts' files need <size>: <limit>. <remedies>; or do without: --fast-replicas 0.",
            "<file> has <size>, and no file of this process may have more than <size>. Raise that limit before the "
            "start: ulimit -f unlimited; h_fsize of Grid Engine.",
        ),
        "A save copies the state of the node's ranks into shared memory, which has three slots for it, or two where "
        "memory is short. The message names the limit that is the tightest of three: the size of the tmpfs, the "
        "host's memory, and the memory limits of cgroups, as containers and Slurm set them; shared memory counts "
        "towards all of them. If two slots do not fit either, the first save fails; a job whose state grows later "
        "goes on and skips saves. The two warnings say that it works with two slots, in which a save may have to wait "
        "for a persist, and that little is left for data loaders. The last message is about the disk that "
        "`--fast-replica-medium` names: it has no room for the copies that `--fast-replicas` asks for.",
        (
            "Docker gives a container 64 MB at /dev/shm unless it is told otherwise; Kubernetes the same.",
            "A memory limit of the container or of the job's cgroup has room for the processes, but not for two or "
            "three copies of the state besides.",
            "Other jobs, or arenas that earlier jobs left, fill /dev/shm.",
        ),
        (
            "See what is needed: `fastckpt plan DIR`, or three times the bytes of what one node saves, with FSDP or ZeRO on several nodes five times (weights, "
            "gradients not, optimizer states twice the weights for Adam).",
            "See what there is: `df -h /dev/shm`, `fastckpt shm ls`; `fastckpt shm clean --yes` removes what earlier "
            "jobs left and nobody needs.",
            "Docker: `docker run --shm-size=64g`. Kubernetes: a volume `emptyDir: {medium: Memory, sizeLimit: 64Gi}` "
            "mounted at /dev/shm, and a memory limit of the container that includes it.",
            "With less: `--fast-slots 2`, or `--fast-no-memory`, which keeps the slots in files on a local disk.",
        ),
        "Checkpoints that are durable, and those in memory, stay. Steps whose saves were skipped are repeated after a "
        "failure.",
        (
            "fastckpt._core.memory.arena",
            "fastckpt._core.memory.saver_address",
            "fastckpt._core.saver.peers.replica_room",
            "fastckpt._core.saver.reservation",
        ),
    ),
    ErrorPage(
        "FC-002",
        "Another job on this host uses the checkpoint directory",
        (
            "checkpoint directory <directory> is in use by another job on this host: <process>. End that job, or give "
            "this one another.",
        ),
        "The memory of a checkpoint directory has one owner on each host: the agent of one launch. The message names "
        "the process that owns it.",
        (
            "The job was started twice.",
            "Two runs, such as those of a sweep, have one checkpoint directory.",
            "The agent of the job before has not ended yet.",
        ),
        (
            "See whether the process that is named is wanted: `ps -fp PID`.",
            "If not, end it with SIGTERM and let it flush; then start again.",
            "If it is, give each run its own checkpoint directory.",
        ),
        "Nothing is lost: neither job has changed what the other one saved.",
        ("fastckpt._core.memory.ownership",),
    ),
    ErrorPage(
        "FC-003",
        "Shared memory, or the process that owns it, belongs to another user",
        (
            "<path> is not a private directory of this user (mode <mode>, owner <uid>); remove it, or choose another "
            "tmpfs with --fast-shm-dir",
            "the process at <address> belongs to user <uid>, not to <uid>",
        ),
        "Checkpoints in memory are read without suspicion only if nobody else can write to them. So an arena has to "
        "be a directory of mode 0700 of the user who runs the job, and workers talk only to an agent of their own "
        "user.",
        (
            "The job ran before as another user, for instance as root in a container.",
            "A script has changed the modes of what is in /dev/shm.",
            "Worker and agent run as different users, for instance because the script is started by sudo.",
            "Another user has taken all eight names that this job's memory may have; one alone is passed over.",
        ),
        (
            "Look at it: `ls -ld PATH`, `fastckpt shm ls` as its owner.",
            "If the other user's checkpoint is needed, start its job once more as that user: it persists what is in "
            "memory.",
            "Have the owner remove it, or choose another place with `--fast-shm-dir`.",
        ),
        "Nothing was touched. What is in that memory can be resumed by its owner alone.",
        (
            "fastckpt._core.ipc.channel",
            "fastckpt._core.memory.ownership",
        ),
    ),
    ErrorPage(
        "FC-004",
        "Processes of an earlier job were still running",
        (
            "killed processes <pids>, which a dead job left writing to <path>",
            "killed processes <pids>, such as loader workers, which <process> left behind",
            "writers of an earlier job still use <path>: its memory is not resumed",
        ),
        "An agent that takes over the memory of one that has died first ends what that one left behind: workers that "
        "may still write there, and their loader workers. Only processes of this user are ended that signed for this "
        "memory, on this host and boot. If they cannot be ended within the time allowed, the memory is not resumed: "
        "it may change while it is read.",
        (
            "The agent was killed with SIGKILL, or by the kernel for lack of memory, and its workers were not.",
            "A worker waits in the kernel for a device or a file system, and cannot die (state D in `ps`).",
            "The processes run in another container, with other process ids, and share the memory.",
        ),
        (
            "If they were killed, nothing: the job resumes from memory.",
            "If not, find them: `fuser -v PATH/*`, or `ps -eo pid,stat,wchan,cmd`; end them, then start again.",
            "Processes in state D go when what they wait for answers, or with the host.",
        ),
        "With the first two messages nothing. With the third what is in memory alone: the newest durable checkpoint "
        "is resumed.",
        (
            "fastckpt._core.memory.presence",
            "fastckpt._core.saver.coordinator",
        ),
    ),
    ErrorPage(
        "FC-005",
        "The memory of a running job was removed",
        ("<path> was removed: what was in memory is lost; it was created again",),
        "The directory under /dev/shm in which this job keeps its checkpoints has gone. The agent makes it again, and "
        "the next save is a whole one.",
        (
            "Somebody, or a clean-up script of the cluster, has removed files in /dev/shm.",
            "A container or a sandbox that shares /dev/shm was cleaned up by its runtime.",
            "systemd's RemoveIPC=yes removes what a user has in /dev/shm when the last session ends: jobs started by "
            "ssh with nohup.",
        ),
        (
            "Find who removes it; exclude `fastckpt-*` from clean-up scripts.",
            "For RemoveIPC: `loginctl enable-linger USER`, or start the job as a service or by the scheduler.",
        ),
        "What was in memory and not durable yet, until the next save. Checkpoints on storage are not touched.",
        ("fastckpt._core.saver.coordinator",),
    ),
    ErrorPage(
        "FC-006",
        "A save was refused: the state could not be loaded again",
        (
            "<path in the state> is a <type>, which torch.load(weights_only=True) refuses. Save <it as> plain Python "
            "values or tensors, allow it with torch.serialization.add_safe_globals, or pass weights_only=False to the "
            "checkpointer if you trust whoever can write to its directory.",
            "<path in the state> is a <type>, which wraps other tensors, and does not load from a file of torch.save "
            "that ranks share. Save a DTensor with fastckpt.fsdp.FsdpShardCheckpointer, or as what its full_tensor() "
            "gives.",
        ),
        "Checkpoints are loaded with `weights_only=True`, which builds no objects of unknown classes, so that a file "
        "cannot run code. What would save but not load is refused at the save, rather than at the resume, when it is "
        "too late.",
        (
            "An object of one's own, a config, a numpy scalar or a dataclass is in the state, where its values should "
            "be.",
            "A model or an optimizer was given, where its `state_dict()` should be.",
            "A sharded model (DTensor) was given to a checkpointer for whole ones.",
        ),
        (
            "Follow the path in the message, such as `state['args'].lr`, and save plain values: `vars(args)`, "
            "`float(x)`, `model.state_dict()`.",
            "For a class that has to stay: `torch.serialization.add_safe_globals([MyConfig])`, in the script, before "
            "saves and loads.",
            "For sharded models: `fastckpt.fsdp`, or `Checkpointer`, which chooses by itself.",
        ),
        "This save. The checkpoints before it stay as they are.",
        ("fastckpt._core.format.loadable",),
    ),
    ErrorPage(
        "FC-007",
        "Saves are skipped",
        (
            "saves are skipped from step <step> on: <reason>",
            "not every rank saves the same steps: <steps by rank>",
            "<saves> skipped, as <reason>: the newest checkpoint is <id> in <directory>",
            "the script succeeded, but none of its saves came to be whole in <directory>: <reason>",
        ),
        "A save found no slot, or some rank's part of it can never come. Training goes on without it. A save that "
        "finds no slot is made up for by the next one; what cannot become whole is skipped until the reason is gone.",
        (
            "Storage is slower than saves come, and all slots wait to be persisted.",
            "A rank is late, hangs, or has ended: this is logged once it has lasted for 5 s. If the rank has failed, or "
            "hangs, the launcher names the cause: an exception, a signal, a hang, a lost host.",
            "Some ranks never save, for instance because they do not call `save_checkpoint()` or `step()`.",
            "A rank has closed its checkpointer before the others, because it got fewer batches (uneven data), and it "
            "had nothing to lend: sharded states need all ranks.",
            "Ranks save different steps: a condition such as `if loss < best` is not the same on all ranks.",
        ),
        (
            "Read the reason at the end of the line. If a worker was restarted, look at the line of the restart instead.",
            "Slow storage: persist less often (`every={'storage': N}`, or the interval of `StorageType.DISK`), or "
            "have three slots.",
            "Uneven data: give all ranks as many batches, with `drop_last=True` or ResumableDataLoader, which fills "
            "up the last step ([data.md](guides/data.md)).",
            "Different steps: decide on one rank, and broadcast.",
        ),
        "Steps since the last save that was made, if the job fails now. The line at the end of the job names the "
        "newest checkpoint that there is.",
        ("fastckpt._core.saver.skipped_saves", "fastckpt_run.events.summary"),
    ),
    ErrorPage(
        "FC-008",
        "A tensor changed while it was copied in the background",
        (
            "<tensor> was written to between the save of step <step> and the next step of an optimizer<lost>. Saves "
            "do not overlap with training any more: from now on each copies all before it returns.",
            "<tensor> changed between the save of step <step> and the wait for its copy, and its version did not: it "
            "was written to by way of .data, numpy or another process. That step was not saved. Write to it within "
            "torch.no_grad() instead, before the save or after the next step of an optimizer, or save without "
            "overlap.",
        ),
        "With `overlap`, tensors that only an optimizer's step changes are copied after the save has returned, until "
        "the next step. Something else has written to one of them meanwhile. The copy may be torn: part of it old, "
        "part new. It does not become a checkpoint.",
        (
            "Weights are swapped after the save, for an evaluation with averaged weights (EMA), and swapped back.",
            "Weights are clipped, pruned or set to other values between the save and the next step.",
            "A state is written to by way of `.data` or numpy, which torch does not see.",
        ),
        (
            "Save after the swap back, or swap before the save ([Swapping "
            "weights](guides/saving.md#swapping-weights)).",
            "Write to tensors within `torch.no_grad()`, not to `.data`.",
            "Or save without `overlap`: each save then copies everything before it returns.",
        ),
        "That step's save, as the message says; the checkpoints before it stay, and later saves are made without "
        "overlap.",
        (
            "fastckpt._core.snapshot.background_copy",
            "fastckpt._core.snapshot.overlap",
        ),
    ),
    ErrorPage(
        "FC-009",
        "A job saves without having loaded what is there",
        (
            "step <step> is saved to <directory> without loading step <step>, which is there: a new history begins "
            "that does not go on from it. Call load_checkpoint() (of Checkpointer: resume()) before the first save, "
            "or give another directory. Retention keeps what was saved before; a checkpoint of the same step takes "
            "its place; to delete it: fastckpt prune <directory> --drop-history <history>",
        ),
        "The directory has a checkpoint, the script has not loaded it, and saves now. Ids order by history, then "
        "step: from now on this job's saves count as newer than all that was there, and a restart resumes them.",
        (
            "The script does not call `load_checkpoint()`, or `resume()`, before it saves.",
            "It loads with other means, such as `torch.load`, in which case nothing is wrong but this line.",
            "A new run was given the directory of an old one.",
        ),
        (
            "Stop the job if it was to go on from what is there.",
            "Call `load_checkpoint()` before the loop, on all ranks; or give the new run its own directory.",
            "Start again. To go on from the older checkpoint although newer ones exist: load it with `resume_path`, "
            "or drop the new history: `fastckpt prune DIR --drop-history N`.",
        ),
        "Nothing yet: earlier checkpoints stay, but those of equal steps are replaced as this job reaches them.",
        ("fastckpt._core.resume.directory_checks",),
    ),
    ErrorPage(
        "FC-010",
        "Not started by fastckpt-run",
        (
            "not started by fastckpt-run: checkpoints are persisted in the background, but nothing keeps the memory "
            "of a killed worker or flushes it. Start the script with fastckpt-run for that.",
        ),
        "The script runs under torchrun, or by itself. The saver then is a thread of the first worker, and memory "
        "goes with that process.",
        (
            "`torchrun`, `python` or `accelerate launch` was used.",
            "The launcher was started in another container.",
        ),
        (
            "Replace `torchrun` by `fastckpt-run`: it takes the same arguments.",
            "Or go on: saves do not block, become durable, and are resumed from storage.",
        ),
        "Nothing now. If a worker is killed, what was not durable yet.",
        ("fastckpt._core.in_process_saver",),
    ),
    ErrorPage(
        "FC-011",
        "The checkpoint directory is in use by another job",
        (
            "waiting, for up to <seconds> s, for <job>: it saves to <directory>, or has died",
            "waiting, for up to <seconds> s, for <process>: <what it does> <directory>",
            "<directory> is in use by another job, which lives: <job>. End that job, or give this one another place; "
            "to take this one away from it, start with --fast-take-over.",
        ),
        "One job at a time saves to a place. Each keeps a record there, which it renews; a later one waits until that "
        "is closed, or has not been renewed for long enough to be sure. If it is renewed all the time, the other job "
        "lives.",
        (
            "The job before was killed without a chance to close its record: the wait ends by itself, within half a "
            "minute.",
            "The job was started twice, perhaps by a scheduler that put it into the queue again.",
            "Two runs share a directory or a prefix of a bucket.",
        ),
        (
            "Wait: if the other job has died, the line is the last that is heard of it.",
            "If it lives, see which host and process the message names, and end the one that is not wanted.",
            "To take the place from a job that cannot be ended: `--fast-take-over`.",
        ),
        "Nothing: this job has not begun.",
        (
            "fastckpt._core.saver.admission",
            "fastckpt._core.saver.persistence.predecessor",
        ),
    ),
    ErrorPage(
        "FC-012",
        "Another job has taken the checkpoint directory",
        (
            "<place> has been taken by <another job>, which opened history <history>: <job>. This job publishes "
            "nothing more there; what it holds in memory stays",
            "<id> became durable in <place> while this job began: it has to resume that one",
        ),
        "A later job has opened a newer history in the place to which this one saves. Two jobs must not both be the "
        "newest, so this one publishes and deletes nothing there any more. With several nodes, the others may have "
        "gone on without this node; it then joins them by itself.",
        (
            "The job was started again while this one still ran, with `--fast-take-over`, or after a pause of this "
            "host so long that it passed for dead.",
            "A network was divided, and the other half of the nodes went on.",
        ),
        (
            "Look at the job that is named: it is the one that goes on.",
            "If this one was the right one, end the other, and start this one again: it resumes the newest checkpoint.",
        ),
        "Durable checkpoints of both stay. What this one saved since it lost the place is in memory only.",
        ("fastckpt._core.saver.persistence.tenure",),
    ),
    ErrorPage(
        "FC-013",
        "A store in which two jobs cannot be told apart",
        (
            "<place> offers no way to make something that one job alone can make, so two jobs that save there cannot "
            "be told apart. Use a directory, s3://, gs:// or abfs:// with a current s3fs, gcsfs or adlfs, or accept "
            "it with --fast-no-exclusive: then see to it that one job at a time saves there.",
            "<place> <fault>: two jobs that save there cannot be told apart. Use a store that knows If-None-Match "
            "(AWS S3 does), or accept that with --fast-no-exclusive.",
        ),
        "A job claims its place by creating an object that only one can create. This store, or the version of its "
        "client, has no such request, or does not honour it.",
        (
            "A store that only resembles S3, or an old release of it.",
            "An old s3fs, gcsfs or adlfs.",
        ),
        (
            "Update the client: `pip install -U s3fs`.",
            "See in the table of [URLs](guides/storage.md#urls) what the store can do.",
            "Or accept it with `--fast-no-exclusive`, and see to it that one job at a time saves there.",
        ),
        "Nothing: nothing was saved there.",
        (
            "fastckpt._core.saver.persistence.tenure",
            "fastckpt._core.storage.remote.object_history",
        ),
    ),
    ErrorPage(
        "FC-014",
        "The ranks do not share the checkpoint directory",
        (
            "<directory> is not the same directory on all nodes: <nodes>. Each node persists what its own ranks have, "
            "so no checkpoint would ever be whole. Mount one file system there on all nodes, such as NFS or Lustre, "
            "or give the URL of a store, such as s3://bucket/run1.",
            "rank <n> saves to <directory>, and rank <m> to <another>: a checkpoint has a part of every rank, so none "
            "would ever be whole. Give all ranks one checkpoint directory.",
        ),
        "Before anything is loaded, the ranks of a node compare their directories, and each node looks for a mark in "
        "the checkpoint directory that one of them has made. Some do not see it. The launcher warns of ranks that load "
        "nothing.",
        (
            "The path has the number of the rank in it, or a random part, as of `tempfile.mkdtemp()`.",
            "The directory is on a local disk of each node, such as /tmp or a scratch disk.",
            "The path is relative, and the nodes started in different directories.",
            "A network file system is not mounted on one of them, or a container has no volume there.",
        ),
        (
            "Leave the rank out of the path: each rank writes a file of its own in it. Choose a random part on one "
            "rank, and broadcast it.",
            "`ls -id DIR; df DIR` on each node that is named.",
            "Give an absolute path on a shared file system, or a URL.",
        ),
        "Nothing: nothing was saved.",
        ("fastckpt._core.preflight", "fastckpt._core.resume.directory_checks"),
    ),
    ErrorPage(
        "FC-015",
        "The directory has checkpoints of another tool only",
        (
            "<directory> holds no checkpoint of fastckpt, but <path>, which <tool> seems to have written: training "
            "would start afresh, without the state of that<more>. <Load it> by what wrote it, and save to another "
            "checkpoint directory. To start afresh, move it elsewhere.",
            "<directory> cannot be searched for checkpoints of others: <error>",
        ),
        "There is nothing to resume that fastckpt wrote, and something that torch.save, DCP, DeepSpeed, Lightning, "
        "transformers, accelerate or Flash Checkpoint wrote. To start afresh without a word would lose that training.",
        (
            "A job is moved to fastckpt, and keeps its directory.",
            "The directory is that of another run.",
        ),
        (
            "Load it once: the message has the call, for instance `load_checkpoint(resume_path=...)`.",
            "Save to another checkpoint directory from then on.",
            "To start afresh: move what is there elsewhere.",
        ),
        "Nothing: the files of the other tool are never changed or deleted.",
        ("fastckpt._core.resume.directory_checks",),
    ),
    ErrorPage(
        "FC-016",
        "Checkpoints exist, but none can be loaded",
        (
            "<directory> holds checkpoints, but none that all ranks can load. Tried: <checkpoints and reasons>. "
            "Restore one of them (what was quarantined is in .fastckpt/quarantine-*, with a why.txt), or, to start "
            "afresh, remove them or choose another checkpoint directory; if it is not shared by all nodes, share it.",
        ),
        "All ranks together have tried each checkpoint in memory and on storage, from the newest on, and some rank "
        "objected to each. A job never starts afresh where there is something: that would be a silent loss.",
        (
            "Files are damaged, cut off or missing, as after a full disk or a lost one.",
            "A node does not see the directory, so that its ranks find nothing.",
            "The state in them does not fit the script any more: an error of `load_state_dict`.",
            "Only the states of some ranks are lost; then the message says which, and with what option to go on.",
        ),
        (
            "Read the reasons behind `Tried:`; they are by rank.",
            "`fastckpt ls DIR` and `fastckpt verify DIR --all` show what each checkpoint lacks.",
            "If all ranks fail alike in loading, mend the script, and start again.",
            "Restore one from a backup or from the remote tier (`--remote URL` of the commands); what was quarantined "
            "can be moved back if it was judged wrongly.",
        ),
        "Nothing was deleted. Damaged checkpoints were moved to the quarantine.",
        ("fastckpt._core.resume.resume",),
    ),
    ErrorPage(
        "FC-017",
        "A newer checkpoint was passed over in a resume",
        (
            "not resumed from <step, history and tier> (<objections>)",
            "<id> on storage is not resumed: <reason>; <what is resumed instead>. <hint>",
        ),
        "Before a checkpoint is loaded, each rank compares sizes and digests of its files; one objection excludes it "
        "for all, and the ranks choose the next one: the same save in another tier, or an older save. Of several "
        "nodes, a checkpoint of which some node's part is missing is no candidate.",
        (
            "A host or a disk failed while a checkpoint was written; such files have no valid digest.",
            "Memory of a host, or a disk, changes bits.",
            "A file was changed or deleted by hand.",
            "A node wrote its part to a directory that the others do not see.",
        ),
        (
            "Read what is resumed instead: often it is the same step in another tier.",
            "`fastckpt verify DIR --all` shows which files are damaged.",
            "If memory was damaged and nobody wrote to it: test the host (`fastckpt check`, a memory test).",
        ),
        "The steps between the checkpoint that was passed over and the one that is resumed; they are trained again.",
        ("fastckpt._core.resume.resume", "fastckpt.dcp.reader"),
    ),
    ErrorPage(
        "FC-018",
        "A damaged checkpoint was quarantined",
        ("quarantined as <place>: <reason>",),
        "A checkpoint on storage that is damaged is moved to `.fastckpt/quarantine-*` in its directory, with the "
        "reason in `why.txt`. It is never loaded and never deleted, and does not stand in the way of the next save of "
        "that step.",
        ("See [FC-017](#fc-017).",),
        (
            "Look at `why.txt`; `fastckpt ls DIR` lists it as quarantined.",
            "If only one file is damaged, others may still be of use: `fastckpt show`, `fastckpt export`.",
            "Delete the folder when nobody needs it: it takes space.",
        ),
        "The files are there. The steps since the checkpoint that is resumed instead are trained again.",
        ("fastckpt._core.resume.storage_tier",),
    ),
    ErrorPage(
        "FC-019",
        "A resume without the rank states of lost ranks",
        (
            "step <step> is resumed without the rank state of ranks <ranks>, which no node holds any more and storage "
            "does not have (--fast-allow-lost-rank-state): on these ranks random generators, and a position in the "
            "data that was saved as rank_state, start as in a new job, while all else goes on from step <step>. They "
            "may read data again, or skip some",
        ),
        "Nodes were lost together with the neighbours that kept copies of their ranks' own files. Model and optimizer "
        "are whole. The option says that such a save is rather resumed than an older one that is complete.",
        ("Two neighbouring hosts, or a rack, were lost at once, before the newest save was durable.",),
        (
            "To resume the older, complete checkpoint: stop, and start without `--fast-allow-lost-rank-state`.",
            "Keep the position of the data in the common state, as `Checkpointer` does: then only random generators "
            "start again.",
            "Persist more often.",
        ),
        "Random states of these ranks, and their position in the data if that was a rank state. The resumed run is "
        "not the uninterrupted one bit for bit.",
        ("fastckpt._core.resume.resume",),
    ),
    ErrorPage(
        "FC-020",
        "The newest checkpoint cannot be read at the moment",
        (
            "<checkpoint> is whole and cannot be read (<objections>)",
            "<reasons>. It is tried again for up to <seconds> s",
            "<reasons>. No older checkpoint is loaded in its place: all that is saved from then on would outrank this "
            "one. Start the job again when it can be read; or load another one by its path; or, to give this one up "
            "for good, remove it.",
            "<directory> cannot be searched for checkpoints: <reasons>",
        ),
        "Storage does not answer, or this process finds no memory, descriptors or room for it. The checkpoint is "
        "probably good: nothing older is "
        "taken in its place without being asked, as that would throw away training.",
        (
            "The network file system or the store is down, or credentials have expired.",
            "TMPDIR has no room for the download of a remote checkpoint.",
            "A limit is too low (ulimit -n, ulimit -v, the cgroup's memory), or this user may not read the files; the "
            "message says which.",
        ),
        (
            "`ls DIR`, or `fastckpt ls URL`, on the node that is named.",
            "Start again when it can be read. A scheduler may do so: the exit code is not 0.",
            "To go on from an older one on purpose: `load_checkpoint(resume_path=...)`.",
        ),
        "Nothing.",
        ("fastckpt._core.resume.survey",),
    ),
    ErrorPage(
        "FC-021",
        "A rank has no state of its own in the checkpoint",
        (
            "rank_state has no <name>: of step <step> rank <rank> has <names>. What a job with another number of "
            "ranks needs, such as the position of a ResumableDataLoader, belongs into the common state: "
            "save_checkpoint(step, {..., <name>: loader.state_dict()}), and load_checkpoint()[<name>]",
            "rank <rank> has no state of its own in this checkpoint: its random state is not restored",
            "<number> ranks saved their own of <entries>, and this job has <ranks>: all load what the first one had",
        ),
        "Each rank saves its random generators, and what it gives as `rank_state`. The checkpoint was saved by fewer "
        "ranks, or before that name was saved, so there is none for this rank. Model, optimizer and the rest of the "
        "common state are loaded as always.",
        (
            "The job has more ranks than when it was saved.",
            "A position in the data was saved as rank state, which has no meaning for another number of ranks.",
            "The script asks for a name that an earlier version of it did not save.",
            "Ranks had parts of the state unlike, such as averages of BatchNorm, and there are more or fewer ranks now.",
        ),
        (
            "Put what all ranks need into the common state; ResumableDataLoader's position counts samples of all "
            "ranks, and is divided again among any number.",
            "Read with `rank_state.get(name)` what may be missing, and begin it as at a first start.",
            "Of random generators the warning needs nothing: those of new ranks begin as the script seeds them.",
            "Go on with as many ranks as saved it, if all ranks need what they had of their own.",
        ),
        "The random numbers of such a rank are not those of the uninterrupted run. With another number of ranks: what all "
        "but the first one had of their own, such as replay buffers.",
        (
            "fastckpt._core.replicas.own_entries",
            "fastckpt._core.resume.load",
            "fastckpt.ddp",
            "fastckpt.fsdp.shards",
        ),
    ),
    ErrorPage(
        "FC-022",
        "Storage refuses what is written",
        (
            "cannot <deed> in <place>: <path>: <error>.<room> <remedy>.",
            "cannot <deed> in <URL>: <error>: <text>. <remedy>.",
        ),
        "A persist, a deletion or another operation in the checkpoint directory, or in the remote store, has failed. "
        "Training goes on, saves to memory go on, and the persist is tried again with growing pauses, then with the "
        "newest checkpoint.",
        (
            "The disk or the quota is full: the message says how much is needed and how much is free.",
            "The file system is mounted read-only, or this user may not write there.",
            "A bucket is missing, or credentials are wrong or have expired.",
        ),
        (
            "Do what the message says at its end: free space, raise the quota, grant the right.",
            "Keep fewer checkpoints: a deletion strategy, or by hand `fastckpt prune DIR --keep-last 3`.",
            "Nothing else: once storage takes it, the newest checkpoint is persisted without a restart. `fastckpt top "
            "DIR` shows what is durable.",
        ),
        "Nothing while the node lives: memory has the newest checkpoint. If the host is lost meanwhile, all since the "
        "newest durable one.",
        (
            "fastckpt._core.io.durable",
            "fastckpt._core.storage.remote.client_errors",
        ),
    ),
    ErrorPage(
        "FC-023",
        "Storage does not answer, or the end of the job waits for it",
        (
            "<URL> has not answered for <seconds> s (to <deed>): it is waited for, <how long>",
            "the end of the job waits: <reason>. <seconds> s are left (--fast-flush-timeout)",
        ),
        "A request to a store, or the last persist of the job, takes long. While training runs it waits for neither. "
        "At the end of the job the agent waits until the newest checkpoint is durable, but no longer than "
        "`--fast-flush-timeout`.",
        (
            "Storage is slow, or many jobs end at once.",
            "A network file system hangs: its server is down.",
            "The checkpoint is large for the rate: bytes per second are in the full summary (`--fast-summary full`).",
        ),
        (
            "Let it wait. A second Ctrl-C gives the flush up; the memory is kept then ([FC-024](#fc-024)).",
            "Give it more time if the rate is known: `--fast-flush-timeout 3600`; a scheduler's grace period has to "
            "be longer than that.",
            "For a file system that hangs: mend it, or end the wait; the next launch resumes from memory.",
        ),
        "Nothing yet.",
        (
            "fastckpt._core.saver.persistence.durable_tiers",
            "fastckpt._core.storage.remote.wait_notice",
        ),
    ),
    ErrorPage(
        "FC-024",
        "The newest checkpoint is in memory only at the end of the job",
        (
            "<id> is in memory only (<reason>). It is kept: the next job with this checkpoint directory on this host "
            "resumes from it, or copy it with: cp -r <path> DESTINATION",
        ),
        "The job has ended, and its last flush was not done: storage refused it, or time was up. The memory is not "
        "given back. It stays until the host restarts, or somebody removes it.",
        (
            "Storage is full or does not answer ([FC-022](#fc-022), [FC-023](#fc-023)).",
            "`--fast-flush-timeout` is shorter than a persist takes.",
            "The flush was given up with a second signal.",
            "Several hosts divide the save, and the files of another one have not come to storage: that one is lost.",
        ),
        (
            "Mend storage.",
            "Start the job again on this host, with the same checkpoint directory: it adopts the memory and persists "
            "it.",
            "Or copy the files by hand, as the message says: they are ordinary framework files. Of a save that several "
            "hosts divide, each has its own: copy those of all hosts into one directory.",
        ),
        "Nothing as long as the host runs. In a container the memory goes with the container, unless /dev/shm is a "
        "volume that outlives it.",
        ("fastckpt._core.saver.coordinator",),
    ),
    ErrorPage(
        "FC-025",
        "The script succeeded, but its checkpoints are not durable (exit code 75)",
        (
            "the script succeeded, but <id> is not durable in <directory>, and <newest durable>: <reason>. Launch the "
            "job here again: it resumes from what is kept in memory, and persists it.",
        ),
        "A job does not count as done while nothing that it saved is durable; with `--fast-require-persist`, while its "
        "newest checkpoint is not. Its exit code is 75, or 74 with `--fast-exit-codes` "
        "([exit codes](reference/exit_codes.md)).",
        ("As of [FC-024](#fc-024).",),
        (
            "Mend storage; the reason is in the message.",
            "Launch the job again on this host: the script finds itself at its end, and the checkpoint is persisted.",
        ),
        "Nothing as long as the host runs.",
        ("fastckpt_run.events.summary",),
    ),
    ErrorPage(
        "FC-026",
        "The remote tier lacks the newest checkpoint, or cannot be reached",
        (
            "the newest checkpoint is not in <URL>: <reason>. The next job uploads it.",
            "the job goes on without its remote store for now: <error>",
            "the remote tier <URL> is ignored in this resume: <error>",
        ),
        "The copies in the remote store lag behind the checkpoint directory. Nothing waits for them: saves, persists "
        "and resumes go on with memory and storage.",
        (
            "The store is down, or credentials have expired.",
            "Uploads are slower than persists; the end of the job had no time left.",
        ),
        (
            "Mend what the reason names. A running job tries again by itself.",
            "After the end: the next job with this directory and this `remote=` uploads it.",
            "If the checkpoint directory itself was lost and the remote tier is needed: see that the store answers "
            "before the job is started, as it is ignored otherwise.",
        ),
        "Nothing, as long as the checkpoint directory is there.",
        (
            "fastckpt._core.resume.storage_tier",
            "fastckpt._core.saver.persistence.uploader",
        ),
    ),
    ErrorPage(
        "FC-027",
        "The job ends: no restart is left",
        (
            "no restart: --max-restarts allows <number>, and none is left",
            "<failed ranks>; not restarted<why> (<where>)",
        ),
        "Workers have failed more often than `--max-restarts` allows; without that option it is 0, as for torchrun. "
        "The newest save was flushed to storage.",
        (
            "`--max-restarts` was not given.",
            "The script fails again and again for one reason: see the last traceback.",
            "A long job has failed now and then for different reasons, and the restarts are simply used up.",
        ),
        (
            "Look at the cause: the line names exception, place and log file of the first rank that failed; `fastckpt "
            "report DIR` lists all failures.",
            "Launch the job again: it resumes the newest checkpoint. A scheduler does so by the exit code "
            "([exit codes](reference/exit_codes.md)).",
            "For long jobs: `--max-restarts 3 --fast-restart-budget 1/h` gives restarts back as training progresses.",
        ),
        "Steps since the newest save; with saves to memory at each step, at most one.",
        (
            "fastckpt_run.failures.restart_notice",
            "fastckpt_run.failures.restarts",
        ),
    ),
    ErrorPage(
        "FC-028",
        "The job ends: it fails again and again without progress",
        (
            "no restart: the workers failed <times> before they came further than before (--fast-max-stalls):",
            "Another start would go the same way. Find the cause in what the workers printed, and launch the job here "
            "again: it resumes the newest checkpoint. If the cause is not in the job, allow more with "
            "--fast-max-stalls; 0 is any number.",
        ),
        "Each of the last starts resumed, and failed at the same step as the one before, or earlier. The lines in "
        "between tell what each resumed, how far it came, and how it ended. Kills from outside count a tenth, unless "
        "the kernel killed for want of memory.",
        (
            "A batch, or a file of the data set, that the script cannot take.",
            "Out of GPU memory in one step that is larger than the others.",
            "A loss that is not finite, and an assertion on it.",
            "A broken device: then it is always a rank of one host.",
        ),
        (
            "Look at the traceback above, and at the step: `fastckpt report DIR`.",
            "If it is the data: mend or skip the sample; the position is in the checkpoint.",
            "If it is a host: start without it (`--fast-node-check` finds many such).",
            "If an older state is needed, as with a diverged loss: `load_checkpoint(resume_path=...)`, [Going "
            "back](guides/saving.md#going-back).",
        ),
        "Nothing: the newest checkpoint was flushed.",
        ("fastckpt_run.failures.restarts",),
    ),
    ErrorPage(
        "FC-029",
        "The script cannot start",
        ("no restart: the script cannot start: <reason>",),
        "The first start failed with an error that each further start would meet again: it is not restarted.",
        (
            "A syntax error, a module that is not installed, a wrong name in an import.",
            "Arguments that the script refuses (exit code 2).",
        ),
        (
            "Mend what the traceback above the line says.",
            "Try it without a launcher: `python train.py --help`.",
        ),
        "Nothing: no step was trained.",
        ("fastckpt_run.failures.restarts",),
    ),
    ErrorPage(
        "FC-030",
        "A worker was killed by SIGKILL",
        ("<rank 1 died: SIGKILL>; <what was resumed>, <left> of <number> restarts left",),
        "A process has ended by a signal that leaves no traceback, and fastckpt-run did not send it. The job has "
        "resumed from the newest save.",
        (
            "The kernel's OOM killer: the host, or a memory limit of the container or cgroup, had no memory left. "
            "Shared memory counts towards the limit, checkpoints as well as data loaders'.",
            "An operator, a scheduler that ends a job, or a monitoring script.",
            "A test: `kill -9`.",
        ),
        (
            "Ask the kernel: `dmesg | grep -i -E 'oom|killed process'`; in a cgroup `memory.events` counts "
            "`oom_kill`; Kubernetes shows OOMKilled.",
            "If it was that: raise the limit, have fewer loader workers, or less memory for checkpoints "
            "(`--fast-slots 2`, `--fast-no-memory`). `fastckpt plan DIR` says what they take.",
            "If memory grows from step to step, look for the leak: [watch.md](operate/watch.md) has the metrics of "
            "memory by node.",
        ),
        "Steps since the newest save: the line says how many are repeated.",
        ("fastckpt_run.failures.restart_notice",),
    ),
    ErrorPage(
        "FC-031",
        "The job hangs",
        (
            "the job hangs, for <seconds> s: <ranks> <reason>; <killing, or why nobody is killed>",
            "the job hangs, as the agent on host <host> has found: <groups of ranks>",
        ),
        "No rank has made progress for longer than steps of this job take, and not because they wait for something "
        "that moves. That is reported after a minute, and again each time that it has lasted twice as long; the job "
        "may go on. At half of the limit that its process group has for collectives all workers are killed and start "
        "again from the newest save; at once, if those that wait do so for a rank that has exited. The lines after it "
        "have the stacks of all ranks; the odd ones are named first.",
        (
            "A rank waits for a file system, a data source or a lock: its stack says where.",
            "Ranks call different collectives, as after a condition that differs among them, or an exception that one "
            "caught.",
            "A GPU or a link is broken: all wait in a collective, and one host's ranks do not answer.",
            "A part of the job is simply slow, such as an evaluation or a compilation that takes minutes.",
        ),
        (
            "Read the stack of the rank that is blamed; `fastckpt report DIR` shows it later, too.",
            "If it is always one host: `fastckpt check` there.",
            "If the job was only slow: mark that part with `with fastckpt.phase('evaluation', timeout=3600):`, or "
            "let the process group wait longer (`init_process_group(timeout=...)`). If it was a hang: "
            "`--fast-hang-timeout SECONDS` ends the next one sooner. [hangs.md](operate/hangs.md) has the rules.",
        ),
        "Steps since the newest save.",
        ("fastckpt_run.hangs.hang_record",),
    ),
    ErrorPage(
        "FC-032",
        "A node is lost",
        (
            "node <node> (<address>) is lost: <reason>",
            "no sign of life from <hosts>: the round ends",
        ),
        "A node gives no sign of life, and other nodes that were asked do not reach it, either. The others stop their "
        "workers, and go on without it, or wait for another in its place, as `--nnodes` says. They resume from their "
        "own memory, if that has all that is needed, else from storage.",
        (
            "The host has crashed, restarted or was taken away (preempted).",
            "Its agent was killed.",
            "Its network is down, or so busy that a second passes without a packet.",
        ),
        (
            "Nothing, if the job goes on. Start an agent on another host, with the same arguments, in its place.",
            "For a host that is lost again and again: `fastckpt check` there, and its system log.",
            "If hosts are slow to answer but live: `--fast-node-timeout 5`.",
        ),
        "At most what was saved in the last tenths of a second before the loss; for sharded states whatever is newer "
        "than the newest durable save ([What a loss costs](clusters/nodes.md#what-a-loss-costs)).",
        (
            "fastckpt_run.detection.neighbor_watch",
            "fastckpt_run.rendezvous.keep_alive",
        ),
    ),
    ErrorPage(
        "FC-033",
        "This node is cut off from the others",
        (
            "isolated: most neighbours of this node do not answer; they are lost, or its own link is down",
            "<isolated ...>; it does not reach <nodes>",
            "this node reaches neither most other nodes nor the store of the rendezvous<why>: its round ends",
            "waiting without workers for <process>: this node joins it when it is reached",
            "this node meets the others, and does not reach the first of them, <host, address>: they go on without it. "
            "Look at the network between the two hosts",
            "the round ends: <count> nodes do not reach its first one, <host, address>, which came last",
            "the other nodes do not reach this one, the first of their round, at <address>: they go on without it. Let "
            "them connect to all ports of this host, or name an address that they reach (--local-addr)",
        ),
        "Seen from here most nodes are gone: rather this one is. It stops its workers, keeps its memory, and looks "
        "for the others. If they have gone on, it joins them when it reaches them. One that alone does not reach "
        "the first node of a round, at which the others meet, ends after 20 s, if these can go on or a spare waits. A "
        "first node that has just replaced a lost one, and that several others do not reach for 7 s, ends itself.",
        (
            "A cable, a switch or an interface is down.",
            "A firewall rule was changed, or a spare has one that the other hosts have not.",
            "The name of a host has no address on the others.",
            "The address of the host changed.",
        ),
        (
            "Look at the link: `ip -s link`, `ping` of a node that the message names.",
            "Nothing else: it joins by itself. To give the node up, end its agent with SIGTERM.",
        ),
        "Nothing: what the others hold is newer, and this node fetches it.",
        (
            "fastckpt_run.detection.neighbor_watch",
            "fastckpt_run.peer_agents",
            "fastckpt_run.rendezvous.first_node",
            "fastckpt_run.rendezvous.keep_alive",
        ),
    ),
    ErrorPage(
        "FC-034",
        "Nodes run different versions of fastckpt, or of torch",
        (
            "nodes run unlike versions of fastckpt: <host> has <version>, <host> has <version>. Install the same on "
            "all nodes.",
            "its version is <version>, ours is <version>: run one version of fastckpt everywhere",
            "this node runs <product> <version>, and the nodes of the job <version>: install <product> <version> here",
            "this node runs <product> <version>, and the nodes of the job <version>: it waits until none of these is "
            "left",
        ),
        "Agents exchange messages and files whose form belongs to a version. They refuse to start rather than to "
        "misunderstand each other. A node that comes later is compared before it costs the job anything: one of an "
        "older version ends with code 2, one of a newer version waits until all nodes of the older one have ended.",
        (
            "Images or environments of the hosts differ.",
            "One was updated while the job ran.",
        ),
        (
            "On each host: `fastckpt-run --version`, in the environment of the job.",
            "Install one version everywhere; then start again.",
            "To go over to a newer version, end and start one node after the other: the job goes on with the last.",
        ),
        "Nothing.",
        (
            "fastckpt_run.members",
            "fastckpt_run.rendezvous.job_terms",
            "fastckpt_run.rendezvous.signing",
        ),
    ),
    ErrorPage(
        "FC-035",
        "The secret of the job is missing, short, or can be read by others",
        (
            "the secret cannot be read from <path>: <error>",
            "<path> has mode <mode>, so others can read the secret of the job; chmod 600 <path>",
            "the secret in <place> has <number> bytes, fewer than <number>; openssl rand -hex 32",
            "the agents of this job at <host>:<port> use <another secret>: give one to all (--fast-secret-file, "
            "FASTCKPT_SECRET)",
        ),
        "Agents of several nodes know each other by a secret that all are given. A file that others can read, or a "
        "short secret, would be none.",
        (
            "The file is not on this node, or its mode is 0644.",
            "A Kubernetes secret is mounted with its default mode; `defaultMode: 0400` is needed.",
            "One node was given another secret, or none.",
        ),
        (
            "Make one: `(umask 077; openssl rand -hex 32 > secret)`.",
            "Copy it to all nodes; `chmod 600 secret`; start each agent with `--fast-secret-file secret`.",
        ),
        "Nothing: the job has not begun.",
        (
            "fastckpt_run.rendezvous.round_store",
            "fastckpt_run.rendezvous.signing",
        ),
    ),
    ErrorPage(
        "FC-036",
        "Nodes have not come to the rendezvous",
        (
            "<number> of <number> nodes have come to <endpoint>; waiting for the others, for <seconds> s at most. "
            "They need the same <options>",
            "<number> nodes have come to <endpoint>; waiting for <hosts>",
            "<number> of <number> nodes came to <endpoint> in <seconds> s. Start the others with the same <options>, "
            "or give them more time (--rdzv-conf join_timeout=SECONDS)",
            "this node waits at <endpoint> for the other nodes of --nnodes <number>, for <seconds> s at most. They need "
            "<options>",
            "this node does not reach the one of --node-rank 0 at <endpoint>; trying for <seconds> s at most. They need "
            "<options>",
            "this node reaches nobody of its job by <names>: the others meet on host <host>, at <endpoint>, as that one "
            "has noted in the store here. Correct these names on this host, in DNS or /etc/hosts",
            "not all of <number> nodes came to <endpoint> in <seconds> s: <error> Start the others with <options>, or "
            "give them more time (--rdzv-conf timeout=SECONDS)<remedy>",
        ),
        "The agents meet before workers start. This one waits for as many as `--nnodes` says.",
        (
            "The others have not been started yet, or wait in a queue.",
            "They were given another endpoint, `--rdzv-id`, `--nnodes` or secret, and wait elsewhere.",
            "`--nnodes 2` alone: torch's static rendezvous then waits at 127.0.0.1, which no other host reaches.",
            "A name resolves to another address there, or a firewall closes the port.",
            "This host has old addresses of the others. It goes to them within seconds if one of them finds it by "
            "the name in the list of endpoints.",
        ),
        (
            "Look at the other agents: each says where it waits, and for how many.",
            "From each host: `nc -vz HOST PORT` of the endpoint.",
            "Without `--rdzv-backend`, give each host the same `--master-addr`, and `--node-rank` 0, 1 and so on; or "
            "`--rdzv-backend c10d --rdzv-endpoint HOST`, which is the same on all.",
            "For hosts that come late: `--rdzv-conf join_timeout=3600` (of the static one `timeout=3600`), or fewer "
            "nodes at least: `--nnodes 3:4`.",
        ),
        "Nothing.",
        (
            "fastckpt_run.rendezvous.meeting",
            "fastckpt_run.rendezvous.referrals",
            "fastckpt_run.rendezvous.static_rendezvous",
        ),
    ),
    ErrorPage(
        "FC-037",
        "No store of the rendezvous answers",
        (
            "no store of the rendezvous answers at <endpoints> after <seconds> s<names>, and this host can hold none. "
            "Name an endpoint on which an agent runs, or several with commas in between (--rdzv-endpoint)",
            "no store can be held at <endpoints>, where is_host demands one: is it in use?",
            "the first node cannot hold its store at <endpoint>, or is not reached there: <error>",
        ),
        "One agent holds the store in which the nodes meet: that of a host which `--rdzv-endpoint` names. Nobody "
        "listens there, and this host is none of these.",
        (
            "The agent on that host has not been started, or has ended.",
            "The name in `--rdzv-endpoint` is unknown here, or of another host.",
            "The port is taken by another process, or closed by a firewall.",
        ),
        (
            "Start the agent on the host of the endpoint.",
            "`getent hosts NAME; nc -vz NAME PORT` on this host.",
            "Name several hosts, so that any of them can hold the store: `--rdzv-endpoint node0:29400,node1:29400`.",
        ),
        "Nothing.",
        ("fastckpt_run.rendezvous.endpoints", "fastckpt_run.rendezvous.static_rendezvous"),
    ),
    ErrorPage(
        "FC-038",
        "A node has failed the node check",
        (
            "<host> failed the node check, and takes no part in the job: <results>. Look at it with `fastckpt check`, "
            "and start the job on another node (--fast-node-check)",
            "the job goes on without nodes that failed the node check: <nodes>",
            "<hosts> failed the node check, and a job with this rendezvous cannot go on without: start it on other "
            "nodes, or use --rdzv-backend c10d, which can",
        ),
        "With `--fast-node-check` each node is checked before it joins, and again after a failure: memory, disk, "
        "devices, and the exchange of data in pairs. This one has a problem that would slow down or stop the whole "
        "job.",
        (
            "A GPU is missing, computes wrongly or much slower than the others.",
            "A disk or /dev/shm is full or read-only.",
            "A link is slow or loses data.",
        ),
        (
            "`fastckpt check` on that host repeats the checks and names limits "
            "([node_check.md](operate/node_check.md)).",
            "Start another host in its place.",
            "If the limit is wrong for these hosts, measure a good one and give it as baseline: `fastckpt check "
            "--json > baseline.json`.",
        ),
        "Nothing.",
        (
            "fastckpt_run.node_check.node_check",
            "fastckpt_run.peer_agents",
        ),
    ),
    ErrorPage(
        "FC-039",
        "The position in the data cannot be saved",
        (
            "data=<type> has no <methods>: its position cannot be saved. Use ResumableDataLoader",
            "the state of <type> leaves out the <part> of its data set: at each resume the samples in it would be "
            "lost. Give data=ResumableDataLoader(dataset, ...), which counts samples, or shuffle elsewhere",
        ),
        "A resume in the middle of an epoch has to go on with the next sample. A plain torch DataLoader does not know "
        "where it is; some streams know only a part of it.",
        (
            "`data=` is a plain `torch.utils.data.DataLoader`.",
            "It is a stream with a shuffle buffer, whose contents its state leaves out.",
        ),
        (
            "Replace `DataLoader(` by `fastckpt.data.ResumableDataLoader(`: it takes the same arguments.",
            "Other loaders with `state_dict` and `load_state_dict` work as they are, such as torchdata's "
            "StatefulDataLoader.",
            "To begin each resume with a new epoch on purpose: leave `data=` out.",
        ),
        "Nothing: it is refused at the start.",
        ("fastckpt._core.data.protocol",),
    ),
    ErrorPage(
        "FC-040",
        "The data, or their order, are not those that were saved with",
        (
            "the position is sample <sample> of <length> of epoch <epoch> in order <order>; here that epoch has "
            "<length> in order <order>. Give the data set, the sampler and shuffle that it was saved with, or load a "
            "state of the beginning of an epoch",
            "<type> would go on with other data: it was saved with <numbers>. Give what it was saved with, or use "
            "ResumableDataLoader",
        ),
        "A position counts samples in an order. With another data set or another order it would point to other "
        "samples: some would be lost, others used twice.",
        (
            "The data set has grown or shrunk, or was filtered otherwise.",
            "`shuffle`, the sampler, or its seed was changed.",
            "A loader that counts batches of a worker or rank, such as StatefulDataLoader, has another number of them "
            "now.",
        ),
        (
            "Give what it was saved with, to the end of the epoch; change the data set between epochs.",
            "For another number of ranks or workers: ResumableDataLoader, which counts samples.",
            "To go on with new data at once: load without the position, from the beginning of an epoch.",
        ),
        "Nothing: nothing was loaded.",
        (
            "fastckpt._core.data.protocol",
            "fastckpt.data.sampler",
        ),
    ),
    ErrorPage(
        "FC-041",
        "A stream gives other samples when it starts again",
        (
            "<type> is shuffled without a seed, so each start and each rank has another order: samples would be lost, "
            "and others used twice. <remedy>; to accept that, pass repeatable=False",
            "<type> gives other samples <where>: sample <number> <how>. Some would be lost, and others used twice. "
            "<remedy>; to accept that, pass repeatable=False",
            "rank <rank>: <sample> of <type> is not the one that was used before the restart: the stream differs "
            "between starts, so some of its samples are lost and others used twice. <remedy>; to accept that, pass "
            "repeatable=False",
        ),
        "A resume of an iterable data set passes over as many samples as were used. That is right only if the stream "
        "gives the same samples again; a trial at the first start, and a comparison at each resume, find out.",
        (
            "It is shuffled without a seed.",
            "Its generators are made once, in `__init__`, and go on when it is iterated again.",
            "Each rank chooses shards for itself, and `sharded=True` was not given.",
            "The files it reads have changed, or are listed in another order.",
        ),
        (
            "Do what the message says for the library of the data set.",
            "Make generators in `__iter__`, from a seed and the epoch.",
            "Where an exact resume does not matter: `repeatable=False`.",
        ),
        "With the errors nothing: they come before the first step. With the warning samples of this epoch, as it says.",
        ("fastckpt.data.streams.trial",),
    ),
    ErrorPage(
        "FC-042",
        "This release of torch is too old",
        ("torch <version> is too old for fastckpt; pip install <requirement>",),
        "fastckpt uses interfaces of torch that older releases do not have.",
        ("An environment was made with another torch, or another package has pinned it.",),
        (
            "`pip install` what the message says, in the environment of the job, on all nodes.",
            "[versions.md](reference/versions.md) has the releases that were tried.",
        ),
        "Nothing.",
        ("fastckpt._core.torch_version",),
    ),
    ErrorPage(
        "FC-043",
        "The checkpoint does not fit the objects of the script",
        (
            "the checkpoint has no <names>; it has <names>. Give the parts that were saved, or load it with the "
            "checkpointer that saved it, such as DdpCheckpointer",
            "<name>, a <type>, does not take its state in the checkpoint: <error>; give the <name> that was saved, "
            "or, to start afresh, another checkpoint directory",
            "<name> was saved as <type>, and is <type> now: the state of one means nothing to the other. Give <type>; "
            "or, to go on with <type>, load the model alone out of the checkpoint's files, and give another "
            "checkpoint directory",
            "<name> was saved with other parameters at these places: the state of <name> in group <number> would go to "
            "<name>, and <number> of <number> in all. Give its parameters in the order in which they were saved "
            "(<names>), or, to start afresh, another checkpoint directory",
            "<name> was saved with parameter groups of <numbers> parameters, and has groups of <numbers> now<names>. "
            "Before resume(), give the optimizer that was saved, and its model: parameters that training unfreezes later "
            "may be in a group from the start (docs/guides/changed_script.md); or give another checkpoint directory",
            "the checkpoint does not fit: <what it lacks, or has in another shape>. Give the model and optimizers that "
            "were saved, or, to start afresh, another checkpoint directory",
        ),
        "The directory has a checkpoint of a model, an optimizer or a scheduler that is not the one of this script.",
        (
            "Model sizes, layers or names were changed since it was saved.",
            "Another optimizer or scheduler was chosen.",
            "A new experiment was given the directory of an old one.",
        ),
        (
            "To go on: give the objects that were saved.",
            "To start a new experiment: another checkpoint directory.",
            "To begin with old weights: `torch.load` the model's file of the checkpoint, or `fastckpt export`, and "
            "save to another directory.",
        ),
        "Nothing: the checkpoint stays as it is.",
        (
            "fastckpt._core.client.optimizers",
            "fastckpt.checkpointer.parameter_names",
            "fastckpt.checkpointer.state",
            "fastckpt.dcp.state_dicts",
        ),
    ),
    ErrorPage(
        "FC-044",
        "Workers that torchrun restarted do not reach each other",
        (
            "gloo could not connect the workers. <explanation>",
            "the process group is still being formed, <seconds> s after this worker began.",
        ),
        "Under plain torchrun the store of the rendezvous outlives the workers. Restarted workers may find in it the "
        "addresses of dead ones, and try to connect to these.",
        ("A restart under torchrun, not fastckpt-run, with gloo.",),
        (
            "Start the script with `fastckpt-run`, which gives each start a store of its own.",
            "Or start torchrun with `TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1` and `--rdzv-backend=c10d`.",
        ),
        "Nothing: the checkpoint is resumed once the workers have met.",
        ("fastckpt._core.client.job_store",),
    ),
    ErrorPage(
        "FC-045",
        "Copies on other hosts are left out",
        (
            "step <step> is not copied to <hosts> (<size> in <files>): <why>. A loss of this host costs what is "
            "not on storage",
            "no copies of other hosts' files are kept here: <why>. To do without: --fast-replicas 0",
            "copies of other hosts' files are given up, <size> in all: saves need the memory. Until the next one is "
            "whole, a failure costs what is not on storage",
            "--fast-replicas <copies> needs <number> hosts, and there are <number>: <number> <copy or parity> is made",
            "copies of <host> (<domain>) are on <hosts>, also <domain>: no host of another failure domain has a place for "
            "them. If all of <domain> is lost, that costs what is not on storage",
            "<why>. Make it again, or name another with --fast-replica-medium disk:DIR",
        ),
        "What one host alone has of a checkpoint, as its shards under FSDP, is copied into the memory of another host, "
        "or to its disk, after each save that all nodes turn to. This one was not: the other host has no room for it, "
        "or its directory for copies was removed, or it could not be reached for 10 s. Training and saves go on, and "
        "the next save is tried again. The message comes once for each kind of trouble; the event `replica_skipped` and "
        "the metric `skipped_replicas_total` count all. The third message comes where fewer hosts go on, have more to "
        "save each, and keep no copies any more, the fourth where there are fewer hosts than copies, or agents share one, the "
        "fifth where domains of `--fast-domain` differ in their number of hosts, the sixth on the host whose DIR is gone.",
        (
            "Memory of the other host holds its own slots, and not two copies besides.",
            "The disk of `--fast-replica-medium disk:DIR` is full, or fails, or DIR was removed.",
            "The network between both is cut or very slow.",
        ),
        (
            "Give the host more shared memory, as the message says; `docs/clusters/replicas.md` has the sizes.",
            "Or have it keep copies on a disk: `--fast-replica-medium disk:DIR`; or have fewer slots: `--fast-slots 2`.",
            "Or do without, and persist more often: `--fast-replicas 0`.",
        ),
        "Nothing now. If a host is lost meanwhile, the steps since the newest save that was copied, or is durable.",
        (
            "fastckpt._core.memory.copies_folder",
            "fastckpt._core.saver.peers.memory_peers",
            "fastckpt._core.saver.peers.replica_room",
            "fastckpt._core.saver.peers.replica_sender",
            "fastckpt_run.peer_agents",
        ),
    ),
    ErrorPage(
        "FC-046",
        "Replicas differ that were equal",
        (
            "<this or another rank> has computed what its replicas have not: <entries>, equal at step <step>, <differ> at "
            "step <step>. So does a processor that is broken<; no majority tells which>. What was saved after step <step> "
            "is not loaded any more",
        ),
        "Ranks compare digests of the weights and of the states of optimizers that all of them have, at the first save "
        "and then about each 100 steps. What has differed from the first time on is kept of each rank. A weight that "
        "was equal before, on all ranks, and is not any more, is silent data corruption: a processor or a memory has "
        "given a wrong result. All ranks end with this error, and the launcher restarts them.",
        (
            "The processor, the memory or the accelerator of that host is broken.",
            "The script changes weights of some ranks alone, at some later step.",
        ),
        (
            "Let the job go on: it resumes the newest save from before, and `--fast-exclude-after` leaves the host out "
            "while a spare waits. Do not move what was quarantined back.",
            "Test the host with `fastckpt check`, and the vendor's diagnostics.",
            "If ranks shall train apart from some step on, as with local SGD, have them do so from the first save on.",
        ),
        "Steps since the last comparison at which ranks were equal. What was saved since then is in "
        "`.fastckpt/quarantine-*`.",
        ("fastckpt._core.replicas.rank_differences",),
    ),
    ErrorPage(
        "FC-047",
        "Two processes say that they are one rank",
        (
            "process <pid> says that it is rank <rank>, but that is process <pid>, which has a checkpointer for this "
            "directory open. Start what saves beside a rank with a directory of its own, and without RANK and "
            "FASTCKPT_AGENT in its environment; what only reads needs no checkpointer (docs/reference/format.md)",
        ),
        "A rank is one process. A second one that opens a checkpointer in its name, as a child that has inherited its "
        "environment, would take over what it saves; it is refused, and the first one goes on.",
        (
            "A rank has started a program that saves or resumes by itself in the same checkpoint directory.",
            "A launcher sets LOCAL_RANK to 0 in all workers, and nothing tells the place of each: see "
            "[devices of their own](reference/launcher.md#devices-of-their-own).",
        ),
        (
            "Give the child a checkpoint directory of its own, and remove RANK and FASTCKPT_AGENT from its environment.",
            "To read a checkpoint, use plain torch ([format](reference/format.md)): that needs no checkpointer.",
            "Where one process follows another, close the checkpointer of the first one before.",
        ),
        "Nothing: the process that was there first goes on saving.",
        ("fastckpt._core.saver.writers",),
    ),
    ErrorPage(
        "FC-048",
        "Ranks have unlike what one of them saves for all",
        (
            "ranks have unlike <entries>, of which one would be saved for all. Have ranks make it equal, or use "
            "fastckpt.Checkpointer, which saves of each rank what is no replica of a shard",
        ),
        "Trainer, accelerate, DeepSpeed and torch's DCP save weights, buffers and states of an optimizer from one rank. "
        "Ranks compare digests of them before the first save, and then about each 100 steps: where they are unlike, a "
        "resume would give all ranks what one had. The save is refused on all ranks.",
        (
            "An optimizer divides its states over the ranks, as Muon or Shampoo may.",
            "Buffers such as averages of BatchNorm are not made equal: `broadcast_buffers=False` of "
            "DistributedDataParallel, `ddp_broadcast_buffers=False` of Trainer.",
            "Ranks start with unlike weights, or train apart.",
            "A processor has computed wrongly before the first comparison after a start: then a restart goes on.",
        ),
        (
            "Use `fastckpt.Checkpointer` or `DdpCheckpointer`: they keep what differs of each rank.",
            "Have buffers made equal: `broadcast_buffers=True`, `ddp_broadcast_buffers=True`.",
            "Of torch's DCP, give what differs a name of its own on each rank.",
        ),
        "What was saved before stays.",
        ("fastckpt._core.replicas.rank_differences",),
    ),
    ErrorPage(
        "FC-049",
        "Another directory shows in the place of the checkpoint directory",
        (
            "<directory> on <host> is not the directory any more in which this job has saved: <what it lacks>. Nothing "
            "is written there, and memory keeps the newest checkpoint. Mount its file system again, and that is "
            "persisted without a restart; if it was made again on purpose, start the job again",
            "<directory> on <host> is not the directory in which the other nodes of this job save: it has <no> mark. "
            "This host takes no part in the job. Mount the file system of the others there, and start its agent again",
        ),
        "The checkpoint directory has a mark, `.fastckpt/identity`, which is read before each write. It is missing, or "
        "is another one. With the first message the job goes on in memory, and persists are tried again; of several "
        "nodes no checkpoint becomes durable without the parts of this one. With the second, the agent of a host that "
        "joins nodes which have saved leaves with exit code 76, and they go on without it.",
        (
            "The file system is not mounted any more on this host, or not yet: what shows is the empty directory below.",
            "A container was started without its volume.",
            "Somebody has removed the directory while the job ran, and made it again.",
        ),
        (
            "On the host: `df DIR; cat DIR/.fastckpt/identity`, and the same on another node.",
            "Mount the file system again. It may have another device number: the mark counts.",
            "If the directory was made again on purpose, stop the whole job and start it again. A directory that was "
            "only emptied is written to as before.",
        ),
        "Nothing while the hosts live: memory has the newest checkpoint. Memory of a host that is left out stays there.",
        (
            "fastckpt._core.saver.persistence.directory_mark",
            "fastckpt._core.storage.local.identity",
        ),
    ),
    ErrorPage(
        "FC-050",
        "A node does not fit the job that it would join",
        (
            "<setting> is <value> on this node, and <value> on the nodes of the job that it would join: give all nodes "
            "the same, and another job another --rdzv-id",
            "<directory> is not the checkpoint directory of the job on this node: mount there what the others have",
            "<directory> cannot be read on this node: <error>. The job has its checkpoints in <directory>",
            "<option> is <directory> on this node, and the job that it would join has its checkpoints in <directory>, "
            "another directory: give all nodes the same, and another job another --rdzv-id",
        ),
        "A node that comes to a running job, or waits as its spare, is compared with its members: `--fast-replicas`, "
        "`--nnodes`, the script's name and the checkpoint directory. With one that differs the job would end on all "
        "nodes. So it ends with code 2 before it joins; the members notice nothing. If the directory cannot be read, it "
        "waits until it can.",
        (
            "The file system of the checkpoint directory is not mounted on this host, or at another path.",
            "Another job has the same `--rdzv-endpoint` and `--rdzv-id`.",
            "The node was started with another command line.",
        ),
        (
            "Correct what the message names, and start this node again.",
            "To change it for the whole job, end all its nodes first.",
        ),
        "Nothing.",
        (
            "fastckpt_run.rendezvous.job_terms",
            "fastckpt_run.rendezvous.node_admission",
        ),
    ),
    ErrorPage(
        "FC-051",
        "Two nodes do not hear each other",
        (
            "this node does not hear <hosts>, though they answer: the link between is dead, or drops large packets",
            "the workers do not go on, and <host> does not hear another node: it leaves",
        ),
        "Both nodes reach others, but not each other. The job goes on as long as its workers do: they may have another "
        "network. If it was reported that they do not go on, or they end twice before a step, the job goes on without one of the two, "
        "where a spare waits or `--nnodes` allows one node less: the node that does not hear most others, or else that of "
        "the higher rank; it waits as a drained host does. [The live page](operate/live_page.md) and `fastckpt top` show "
        "who hears whom.",
        (
            "A cable or a switch port of one host is broken, or a route between the two is missing.",
            "Jumbo frames (`ip link`: an MTU above 1500) are on at the hosts, and off at a switch between them.",
            "A firewall drops what one of the hosts sends to the other.",
        ),
        (
            "Try `ping -s 1400 -M do HOST` from one host to the other, and `ping -s 8900 -M do HOST` with jumbo frames.",
            "When the link is mended, take the host back in: `fastckpt drain --undo HOST`.",
            "If no spare waits, and `--nnodes` allows no node less: start a spare node.",
        ),
        "Nothing: the job goes on from the last checkpoint that all of its nodes have in memory.",
        ("fastckpt_run.peer_agents",),
    ),
)

_HEAD = """\
# Messages with a code

Messages that need more than a sentence end with a code: `(FC-001, docs/errors.md#fc-001)`. Exceptions have it as
`error.code`. Look for a code here, or for some words of the message; `<...>` stands for what differs.

This page is made from `docs_site/error_pages.py` by `make docs-reference`.

| code | message about |
| --- | --- |
"""


def document() -> str:
    """The text of docs/errors.md."""
    rows = "".join(f"| [{page.code}](#{page.code.lower()}) | {page.title} |\n" for page in PAGES)
    return _HEAD + rows + "".join(map(_section, PAGES))


def _section(page: ErrorPage) -> str:
    lines = "\n".join(page.lines) if page.lines else "(no message any more)"
    causes = "\n".join(f"- {each}" for each in page.causes)
    remedies = "\n".join(f"{number}. {each}" for number, each in enumerate(page.remedies, start=1))
    return f"""
## {page.code}

**{page.title}**

```text
{lines}
```

{page.meaning}

Usual causes:

{causes}

What to do:

{remedies}

What is lost: {page.lost[0].lower()}{page.lost[1:]}
"""
