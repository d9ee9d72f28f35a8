//! `kerf status`: asks the running `kerf node` through its socket and draws
//! the answer. It opens no driver library and needs no API server, but for
//! `--cluster`, which asks nothing else.

pub(crate) mod cluster;

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use kerf_dra_driver::status::NodeStatus;

use crate::arguments::{KubeletArguments, StatusArguments};
use crate::picture;

/// A status of 64 GPUs full of partitions is far below this.
const LIMIT_BYTES: u64 = 16 << 20;

/// Prints the node's status, or the cluster's.
pub(crate) fn run(arguments: &StatusArguments) -> Result<()> {
    if arguments.cluster {
        return cluster::run(arguments);
    }
    let text = ask(&arguments.kubelet)?;
    let mut out = std::io::stdout().lock();
    if arguments.json {
        writeln!(out, "{}", text.trim_end())?;
        return Ok(());
    }
    out.write_all(picture::draw(&parse(&text)?).as_bytes())?;
    Ok(())
}

/// The answer of the running `kerf node`.
pub(crate) fn ask(kubelet: &KubeletArguments) -> Result<String> {
    let socket = kubelet.plugin_dir().join("status.sock");
    let stream = UnixStream::connect(&socket).with_context(|| {
        format!(
            "no `kerf node` answers on {}: it does not run on this node, or has only begun; `kerf doctor` tells more",
            socket.display()
        )
    })?;
    stream.set_read_timeout(Some(Duration::from_secs(10))).context("cannot set a read timeout")?;
    let mut text = String::new();
    stream.take(LIMIT_BYTES).read_to_string(&mut text).context("the answer could not be read")?;
    ensure!(
        !text.is_empty(),
        "`kerf node` could not tell its status; the log of its pod on this node says why"
    );
    Ok(text)
}

/// Reads an answer.
pub(crate) fn parse(text: &str) -> Result<NodeStatus> {
    serde_json::from_str(text)
        .context("the answer is not a status this version understands (try the `kerf` of the running pod)")
}
