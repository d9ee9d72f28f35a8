//! Every version of our slices that the API server stored while something
//! happened: between two questions much may be withdrawn and published again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};

use anyhow::{Context as _, Result, anyhow, ensure};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kerf_e2e::{LIMIT, Scene};
use serde::Deserialize;

use crate::ground::DRIVER;

/// One version of a slice.
#[derive(Debug, Deserialize)]
pub(crate) struct Stored {
    /// `ADDED`, `MODIFIED` or `DELETED`.
    #[serde(rename = "type")]
    event: String,
    #[serde(rename = "object")]
    pub(crate) slice: ResourceSlice,
}

/// `kubectl get --watch`, ended with this value.
pub(crate) struct Watch {
    kubectl: Child,
    output: Option<JoinHandle<std::io::Result<String>>>,
}

impl Drop for Watch {
    fn drop(&mut self) {
        let _ = self.kubectl.kill();
        let _ = self.kubectl.wait();
    }
}

impl Watch {
    pub(crate) fn begin(scene: &Scene<'_>) -> Result<Self> {
        let mut kubectl = scene.cluster.kubectl();
        kubectl.args(["get", "resourceslices", "--watch", "--output-watch-events", "--output=json"]);
        let mut kubectl = kubectl.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()?;
        let mut output = kubectl.stdout.take().context("kubectl has no output")?;
        let (listed, has_listed) = mpsc::channel();
        let output = thread::spawn(move || {
            let mut text = vec![0];
            // Only what is stored from here on is seen for certain.
            output.read_exact(&mut text)?;
            let _ = listed.send(());
            output.read_to_end(&mut text)?;
            String::from_utf8(text).map_err(std::io::Error::other)
        });
        let watch = Self { kubectl, output: Some(output) };
        has_listed.recv_timeout(LIMIT).context("kubectl lists no slices")?;
        Ok(watch)
    }

    /// What was stored, oldest first, beginning with what was there.
    pub(crate) fn end(mut self) -> Result<Vec<Stored>> {
        ensure!(self.kubectl.try_wait()?.is_none(), "kubectl ended before it was told to");
        self.kubectl.kill()?;
        let output = self.output.take().context("it has ended")?;
        let text = output.join().map_err(|_| anyhow!("reading kubectl's output panicked"))??;
        let mut all = Vec::new();
        for stored in serde_json::Deserializer::from_str(&text).into_iter::<Stored>() {
            match stored {
                Ok(stored) => all.push(stored),
                // The last one may be cut off.
                Err(error) if error.is_eof() => break,
                Err(error) => return Err(error.into()),
            }
        }
        all.retain(|stored| stored.slice.spec.driver == DRIVER);
        Ok(all)
    }
}

/// Fails if a device that was published was withdrawn, if only for an instant:
/// the pool was whole without it. A pool that is not whole, as when a kubelet
/// that starts has deleted its slices, offers nothing to anybody.
pub(crate) fn nothing_was_withdrawn(stored: &[Stored]) -> Result<()> {
    let mut slices: BTreeMap<&str, &ResourceSlice> = BTreeMap::new();
    let mut published: BTreeSet<&str> = BTreeSet::new();
    for Stored { event, slice } in stored {
        let name = slice.metadata.name.as_deref().context("a slice has no name")?;
        if event == "DELETED" {
            slices.remove(name);
        } else {
            slices.insert(name, slice);
        }
        let Some(now) = offered(&slices) else { continue };
        let withdrawn: Vec<_> = published.difference(&now).collect();
        let version = slice.metadata.resource_version.as_deref().unwrap_or_default();
        ensure!(withdrawn.is_empty(), "with version {version} of {name} were withdrawn {withdrawn:?}");
        published = now;
    }
    ensure!(!published.is_empty(), "no pool was seen");
    Ok(())
}

/// The devices of a node's only pool, if all slices of its generation are there.
fn offered<'a>(slices: &BTreeMap<&str, &'a ResourceSlice>) -> Option<BTreeSet<&'a str>> {
    let pools = slices.values().map(|slice| &slice.spec.pool);
    let newest = pools.max_by_key(|pool| pool.generation)?;
    let of_it = slices.values().filter(|slice| slice.spec.pool.generation == newest.generation);
    let is_whole = i64::try_from(of_it.clone().count()) == Ok(newest.resource_slice_count);
    is_whole.then(|| {
        of_it
            .flat_map(|slice| slice.spec.devices.iter().flatten())
            .map(|device| device.name.as_str())
            .collect()
    })
}
