//! Child processes that cannot outlive the sandbox, however it ends.
//!
//! Each child runs under `setpriv --pdeathsig`, so that the kernel signals it when its parent dies. The kernel means
//! the parent *thread*; all children are therefore started by one thread that lives as long as this process.

use std::ffi::{OsStr, OsString};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::OnceLock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// `exec`s the program unless the sandbox died before the kernel was told to signal us.
const EXEC_IF_PARENT_LIVES: &str = "test \"$PPID\" = \"$0\" || exit 1; exec \"$@\"";

/// An operating-system user to run a child as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct User {
    uid: u32,
    gid: u32,
}

impl User {
    /// Whom to run PostgreSQL as, which refuses to run as root: nobody else when this process is not root, else
    /// `postgres`, else `nobody`.
    ///
    /// # Errors
    /// This process is root and neither user exists.
    pub fn unprivileged() -> io::Result<Option<Self>> {
        if !rustix::process::geteuid().is_root() {
            return Ok(None);
        }
        let accounts = std::fs::read_to_string("/etc/passwd")?;
        let user = |name: &str| {
            let account: Vec<_> =
                accounts.lines().find(|line| line.split(':').next() == Some(name))?.split(':').collect();
            Some(Self { uid: account.get(2)?.parse().ok()?, gid: account.get(3)?.parse().ok()? })
        };
        user("postgres").or_else(|| user("nobody")).map(Some).ok_or_else(|| {
            io::Error::other("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as")
        })
    }

    /// Hand a file or directory over to this user.
    ///
    /// # Errors
    /// As `chown(2)`.
    pub fn own(self, path: &Path) -> io::Result<()> {
        chown(path, Some(self.uid), Some(self.gid))
    }
}

/// What to start, and how; can be started again.
#[derive(Debug, Clone)]
pub struct Launch {
    /// How the child is called in messages.
    pub name: String,
    /// The executable.
    pub program: PathBuf,
    /// Its arguments. Secrets go into the environment.
    pub args: Vec<OsString>,
    /// Environment variables beside the inherited ones. Inherited `PG*` and `TRIBUTARY_*` are taken away, so that a
    /// developer's shell does not change what the sandbox does.
    pub env: Vec<(String, OsString)>,
    /// Where its standard output and error go.
    pub log: PathBuf,
    /// Run as another user.
    pub user: Option<User>,
    /// The signal that the kernel sends when the sandbox dies.
    pub on_parent_death: &'static str,
}

impl Launch {
    /// The command under `setpriv`.
    fn command(&self) -> Command {
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", self.on_parent_death]);
        if let Some(user) = self.user {
            command.args(["--reuid", &user.uid.to_string(), "--regid", &user.gid.to_string(), "--clear-groups"]);
        }
        let parent = std::process::id().to_string();
        command.args(["--", "/bin/sh", "-c", EXEC_IF_PARENT_LIVES]).arg(parent).arg(&self.program).args(&self.args);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| name.starts_with("PG") || name.starts_with("TRIBUTARY_")) {
                command.env_remove(name);
            }
        }
        command.envs(self.env.iter().map(|(name, value)| (name, value))).stdin(Stdio::null());
        command
    }

    /// Run to the end; standard output and error come back together.
    ///
    /// # Errors
    /// The program cannot be started.
    pub fn run(&self) -> io::Result<(ExitStatus, String)> {
        let mut command = self.command();
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let output = spawn(command)?.wait_with_output()?;
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        Ok((output.status, text))
    }

    /// Start it in the background.
    ///
    /// # Errors
    /// The program or its log cannot be opened.
    pub fn start(&self) -> io::Result<Process> {
        let log: File = OpenOptions::new().create(true).append(true).open(&self.log)?;
        let mut command = self.command();
        // A process group of its own: Ctrl-C in the terminal reaches the sandbox alone, which stops its children in order.
        command.stdout(log.try_clone()?).stderr(log).process_group(0);
        let child = spawn(command)
            .map_err(|error| io::Error::new(error.kind(), format!("cannot start {}: {error}", self.name)))?;
        Ok(Process { launch: self.clone(), child })
    }
}

/// A running child. Dropping it kills it.
#[derive(Debug)]
pub struct Process {
    launch: Launch,
    child: Child,
}

impl Process {
    /// How it is called in messages.
    pub fn name(&self) -> &str {
        &self.launch.name
    }

    /// Its process id.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it was started.
    pub fn launch(&self) -> &Launch {
        &self.launch
    }

    /// Its exit status, once it ended.
    pub fn exited(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().ok().flatten()
    }

    /// Send it a signal; nothing happens if it ended.
    pub fn signal(&mut self, signal: Signal) {
        if self.exited().is_none() {
            // It can end between the two calls, and its id stays ours until it is waited for.
            let _ = i32::try_from(self.pid()).ok().and_then(Pid::from_raw).map(|pid| kill_process(pid, signal));
        }
    }

    /// Ask it to end; kill it when it has not within `grace`. Whether it ended by itself.
    pub fn stop(&mut self, signal: Signal, grace: Duration) -> bool {
        self.signal(signal);
        let ended = self.ended_within(grace);
        if !ended {
            self.kill();
        }
        ended
    }

    /// Ask it to end, and again with another signal when it has not within `grace`. Whether it ended.
    pub fn stop_or(&mut self, first: Signal, grace: Duration, second: Signal) -> bool {
        self.signal(first);
        if self.ended_within(grace) {
            return true;
        }
        self.signal(second);
        self.ended_within(grace)
    }

    /// Whether it ends within this time.
    pub fn ended_within(&mut self, time: Duration) -> bool {
        let deadline = Instant::now() + time;
        while self.exited().is_none() {
            if Instant::now() > deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) {
        // Fails only when it ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Start the same again after its end.
    ///
    /// # Errors
    /// As [`Launch::start`].
    pub fn restart(&mut self) -> io::Result<()> {
        self.kill();
        *self = self.launch.start()?;
        Ok(())
    }

    /// Set an environment variable from the next start on.
    pub fn set_env(&mut self, name: &str, value: impl Into<OsString>) {
        self.launch.env.retain(|(known, _)| known != name);
        self.launch.env.push((name.to_owned(), value.into()));
    }

    /// The last lines of its log, for a message about its end.
    pub fn last_words(&self) -> String {
        last_lines(&self.launch.log, 8)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// The last `count` lines of a text file; empty when there is none.
pub fn last_lines(path: &Path, count: usize) -> String {
    let text = std::fs::read(path).map(|octets| String::from_utf8_lossy(&octets).into_owned()).unwrap_or_default();
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].join("\n")
}

/// The first executable of this name in `PATH`.
pub fn in_path(name: impl AsRef<OsStr>) -> Option<PathBuf> {
    let name = name.as_ref();
    std::env::split_paths(&std::env::var_os("PATH")?).map(|dir| dir.join(name)).find(|path| path.is_file())
}

type Order = (Command, Sender<io::Result<Child>>);

/// Start a child from the thread that outlives all others.
fn spawn(command: Command) -> io::Result<Child> {
    static PARENT: OnceLock<Sender<Order>> = OnceLock::new();
    let parent = PARENT.get_or_init(|| {
        let (orders, received): (_, Receiver<Order>) = channel();
        std::thread::spawn(move || {
            for (mut command, answer) in received {
                // An asker that is gone wants no child.
                if let Err(unwanted) = answer.send(command.spawn())
                    && let Ok(mut child) = unwanted.0
                {
                    let _ = child.kill();
                }
            }
        });
        orders
    });
    let (answer, child) = channel();
    let gone = || io::Error::other("the thread that starts processes is gone");
    parent.send((command, answer)).map_err(|_| gone())?;
    child.recv().map_err(|_| gone())?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_survives_the_thread_that_asked_for_it_and_not_its_process() {
        let launch = Launch {
            name: "sleep".to_owned(),
            program: "/bin/sleep".into(),
            args: vec!["60".into()],
            env: Vec::new(),
            log: "/dev/null".into(),
            user: None,
            on_parent_death: "KILL",
        };
        let mut process = std::thread::spawn(move || launch.start().unwrap()).join().unwrap();
        std::thread::sleep(Duration::from_millis(200));
        assert!(process.exited().is_none());
        let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).unwrap();
        assert!(status.contains("sleep"), "the program replaces its launcher: {status}");
        assert!(process.stop(Signal::TERM, Duration::from_secs(5)));
    }
}
