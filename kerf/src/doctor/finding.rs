//! What `kerf doctor` can find: one table, of which `docs/doctor.md` is made
//! too.

/// How bad a finding is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Severity {
    /// Something does not work, or claims will fail.
    Error,
    /// It works, and may not do so as expected.
    Warning,
}

impl Severity {
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Error => "error",
            Self::Warning => "warning",
        }
    }
}

/// What is said of a kind of finding.
pub(crate) struct Row {
    pub(crate) id: &'static str,
    pub(crate) severity: Severity,
    pub(crate) what: &'static str,
    pub(crate) why: &'static str,
    pub(crate) remedy: &'static str,
}

macro_rules! kinds {
    ($($kind:ident $id:literal $severity:ident $what:literal $why:literal $remedy:literal;)*) => {
        /// A kind of finding.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub(crate) enum Kind { $($kind),* }

        impl Kind {
            /// All, in the order in which they are looked for.
            #[cfg(test)]
            pub(crate) const ALL: &[Self] = &[$(Self::$kind),*];

            pub(crate) const fn row(self) -> Row {
                match self {
                    $(Self::$kind => Row {
                        id: $id,
                        severity: Severity::$severity,
                        what: $what,
                        why: $why,
                        remedy: $remedy,
                    }),*
                }
            }
        }
    };
}

kinds! {
    DriverLibraryMissing "driver-library-missing" Error
        "NVIDIA's management library is not found under the driver root."
        "Without libnvidia-ml.so.1 no GPU can be seen, and nothing is published."
        "Install the NVIDIA driver, or name the folder it is installed in with --driver-root (chart value driverRoot; GPU operator: /run/nvidia/driver, GKE: /home/kubernetes/bin/nvidia).";
    DriverLibraryUnusable "driver-library-unusable" Error
        "NVIDIA's management library cannot be loaded or initialised."
        "The file is damaged, of another architecture or C library, or the driver refuses to start."
        "Run nvidia-smi on the host; if it fails too, install the driver again and look into the kernel log for NVRM lines.";
    KernelModuleNotLoaded "kernel-module-not-loaded" Error
        "The driver's kernel module is not loaded."
        "The library is there but has no driver to speak to."
        "Run `modprobe nvidia`; if that fails, the module was not built for this kernel: install the driver again for it.";
    DriverVersionMismatch "driver-version-mismatch" Error
        "The loaded kernel module is of another version than the driver's library."
        "The driver was upgraded, and the old kernel module still runs."
        "Drain the node and reboot it, or unload and load the nvidia kernel modules.";
    DriverNoPermission "driver-no-permission" Error
        "The driver refuses this process."
        "The device nodes cannot be opened by this user, or a device cgroup forbids it."
        "Run kerf as root in a privileged container, as the chart does.";
    NoGpus "no-gpus" Error
        "The driver answers, and has no GPU."
        "The GPUs are bound to another kernel driver (vfio-pci), excluded, or have fallen off the bus."
        "Compare with `lspci -d 10de: -k` on the host and look into the kernel log for NVRM and Xid lines.";
    GpuUnreadable "gpu-unreadable" Error
        "A GPU cannot be read."
        "It is lost, hangs, or must be reset; its devices are not given out."
        "Look for Xid lines in the kernel log; reset the GPU (`nvidia-smi --gpu-reset -i …`) or reboot the node.";
    MigModePending "mig-mode-pending" Warning
        "A GPU's MIG mode is changed only after its next reset."
        "On Ampere a change of the MIG mode waits for a reset; until then the GPU serves what its current mode can."
        "Stop what uses the GPU and reset it, or reboot the node.";
    ModeChangeBlocked "mode-change-blocked" Warning
        "Processes use a GPU whose MIG mode is to be changed."
        "The driver changes the mode only of a GPU that nobody has open."
        "Stop the named processes: monitors (dcgm, dcgm-exporter) and nvidia-persistenced are the usual ones.";
    MigProfileAbsent "mig-profile-absent" Warning
        "A profile of --mig-profiles (chart value migProfiles) is one that no GPU of this node has."
        "Nothing is published of it here. One value serves all nodes, so this is usual where their models differ."
        "Nothing if another node has it; else correct the name: `nvidia-smi mig -lgip` lists those of a GPU.";
    NothingOffered "nothing-offered" Warning
        "Nothing of a vGPU guest in MIG mode is offered."
        "There MIG and the partitions are the hypervisor's: only those that it made can be given out. There are none, or foreignPartitions is `ignore`."
        "Make partitions on the host, and set --foreign-partitions (chart value foreignPartitions) to `publish`.";
    DriverFilesIncomplete "driver-files-incomplete" Error
        "The driver's files for containers are not complete, or of two versions."
        "A container needs libcuda of the version of the loaded driver; files of two versions never go into one."
        "End the driver's upgrade by a reboot, or install the driver again with its CUDA libraries (not only its kernel part).";
    DeviceNodeUnknown "device-node-unknown" Error
        "A device node is not there, and its number is not known."
        "kerf makes missing nodes, but the kernel module that owns the number is not listed in /proc/devices."
        "Run `modprobe nvidia-uvm` (or `nvidia-modprobe -u -c 0`); for nvidia-caps load a driver that has MIG support.";
    DeviceNodeUnusable "device-node-unusable" Error
        "Something that is no device stands in the place of a device node, or it cannot be looked at."
        "Often a folder that a container runtime made for a hostPath mount."
        "Remove it; the node is then made anew.";
    DeviceNodeOutdated "device-node-outdated" Warning
        "A device node has the number of a former load of the driver."
        "Dynamic majors change when modules are loaded anew. kerf replaces the node at the next prepare; others may still use the old one."
        "Nothing for kerf; for others run `nvidia-modprobe -u -c 0`, or remove the node.";
    BootIdUnreadable "boot-id-unreadable" Error
        "The kernel's boot id cannot be read."
        "Journal entries belong to one boot; without the id `kerf node` does not start."
        "Check --proc-root: sys/kernel/random/boot_id must be below it.";
    KubeletRootMissing "kubelet-root-missing" Error
        "The kubelet's root folder is not there."
        "The kubelet finds plugins below it; some distributions have it elsewhere (k0s, microk8s)."
        "Set --kubelet-root (chart value kubeletRoot) to the kubelet's --root-dir, and mount it into the pod at the same path.";
    RegistryFolderUnusable "registry-folder-unusable" Error
        "The kubelet's registry folder is missing or cannot be written."
        "The plugin's registration socket is put there."
        "Start the kubelet, which makes it; mount plugins_registry into the pod, not read-only.";
    PluginFolderUnusable "plugin-folder-unusable" Error
        "The plugin's folder cannot be written."
        "The journal and the sockets are there."
        "Mount the kubelet's plugins folder into the pod, not read-only; check whether the disk is full or read-only.";
    NodeNotRunning "kerf-node-not-running" Warning
        "No `kerf node` answers on this node."
        "Nothing is published or prepared while it does not run."
        "Look at its pod on this node: `kubectl get pods -A -o wide -l app.kubernetes.io/name=kerf`, then describe and logs.";
    NodeNotReady "kerf-node-not-ready" Error
        "`kerf node` runs and is not ready."
        "The detail is what it is waiting for."
        "Act on the detail; the log of its pod says the same with more around it.";
    RegistrationSocketMissing "registration-socket-missing" Error
        "`kerf node` runs, and its registration socket is not in the kubelet's registry folder."
        "The kubelet then forgets the plugin. Usually two different folders are meant."
        "Give the kubelet's --root-dir to kerf as --kubelet-root, with the same path inside the pod.";
    DriverNameTaken "driver-name-taken" Error
        "Another driver serves under our driver name."
        "The kubelet knows one driver of a name; both would publish the same pools and prepare each other's claims, so kerf gives out no GPU meanwhile (taint `rival`)."
        "Uninstall the other driver (usually NVIDIA's), or give kerf another --driver-name.";
    DevicePluginBeside "device-plugin-beside" Error
        "NVIDIA's device plugin runs on this node."
        "It hands out the same GPUs without knowing of claims: two pods would get one GPU, so kerf gives out none meanwhile (taint `rival`)."
        "Keep it off the nodes that kerf serves (node selector or, with the GPU operator, `devicePlugin.enabled=false`).";
    OtherDriverBeside "other-driver-beside" Error
        "Another DRA driver for NVIDIA GPUs is registered on this node."
        "It publishes the same GPUs under another name: two claims would get one GPU, so kerf gives out none meanwhile (taint `rival`)."
        "Uninstall it, or keep it off the nodes that kerf serves.";
    ComputeDomainBeside "compute-domain-beside" Warning
        "NVIDIA's compute-domain driver is registered on this node."
        "It does not hand out GPUs itself, but comes with a driver that does unless `resources.gpus.enabled=false`."
        "Make sure that the GPU part of NVIDIA's DRA driver is off.";
    JournalQuarantine "journal-quarantine" Error
        "The journal has entries in quarantine."
        "They could not be read; the GPUs in their names are not given out until they are settled."
        "Delete the claim's pods so that it is unprepared, or, if no pod uses these GPUs, remove the file.";
    JournalEntryUnreadable "journal-entry-unreadable" Error
        "A journal entry cannot be read."
        "It is damaged, or of a version too far away; the GPUs in its name are not given out."
        "After a downgrade run the newer version again; else delete the claim's pods, or remove the file if none uses these GPUs.";
    JournalOtherBoot "journal-of-another-boot" Warning
        "The journal has entries of another boot."
        "The node was rebooted; an entry is taken over or prepared again, or goes with its claim after ten minutes."
        "Nothing while pods start after a reboot; if it stays, see whether the named claims still exist.";
    CdiFolderUnusable "cdi-folder-unusable" Error
        "The folder of CDI specs is missing or cannot be written."
        "Containers get their devices by a spec in it; without it every prepare fails."
        "Mount the folder that the container runtime reads (cdi_spec_dirs) into the pod, not read-only, and name it with --cdi-root.";
    HookFolderUnusable "hook-folder-unusable" Error
        "The folder for the CDI hook's program cannot be written, or programs in it cannot be started."
        "The container runtime starts that program for each container with a GPU; without it none starts."
        "Name a folder on a file system that is writable and not mounted noexec with --hook-root (chart value hookRoot); on GKE's Container-Optimized OS /home/kubernetes/bin/kerf.";
    HookFolderClosed "hook-folder-closed" Warning
        "Not everybody may pass through a folder above the CDI hook's program."
        "A pod with a user namespace (`hostUsers: false`) starts the program as nobody: such pods with a GPU cannot start."
        "Make the folder passable (`chmod o+x`), or name another one with --hook-root (chart value hookRoot).";
    CdiSpecAllGpus "cdi-spec-all-gpus" Warning
        "Another CDI spec offers all GPUs at once."
        "Whoever may name CDI devices (annotations, NVIDIA_VISIBLE_DEVICES) gets GPUs past the claims."
        "Remove the spec if nothing needs it (nvidia-ctk cdi generate, device plugin, GPU operator).";
    ContainerdCdiOff "containerd-cdi-off" Error
        "CDI is switched off in containerd."
        "containerd then ignores the devices of claims: containers start without GPUs."
        "Set `enable_cdi = true` in the CRI plugin's section and restart containerd.";
    ContainerdCdiUnset "containerd-cdi-unset" Warning
        "containerd's configuration is of a version before 2 and does not say whether CDI is on."
        "It is on by default in containerd 2.x, and off in 1.7."
        "With containerd 1.7 set `enable_cdi = true` in the CRI plugin's section and restart it.";
    ApiServerUnreachable "api-server-unreachable" Error
        "The API server does not answer."
        "Slices are not written and claims not read; running pods go on, and unprepare needs no API server."
        "Look at the network of this node and its pods, at the API server, and whether a network policy forbids it.";
    ApiServerTooOld "api-server-too-old" Error
        "The API server has no resource.k8s.io/v1."
        "It came with Kubernetes 1.34; shared counters, without which no partition is published beside its GPU, with 1.36."
        "Upgrade the cluster to 1.36 or newer.";
    PermissionMissing "permission-missing" Error
        "kerf may not do something that it must."
        "Its service account lacks a permission; another one than the chart's is used, or the ClusterRole was changed."
        "Install the chart's ClusterRole and binding again (`helm upgrade`), or grant what the detail names.";
    ApiServerDropsFields "api-server-drops-fields" Error
        "The API server drops fields of ResourceSlices without a word."
        "Their feature gate is off there. Without counters only whole GPUs or only partitions can be offered; without taints a bad device is given out."
        "Turn the gate of the detail on in the API server, and in the scheduler and kubelet too, then restart kerf.";
    ClaimsWaitBesideFree "claims-wait-beside-free-devices" Warning
        "Claims of pods wait though the devices they ask for are free."
        "If many do, the scheduler may have its feature gate DRAPartitionableDevices off: it then passes over whatever has counters. If few do, something of the pods' own keeps them from the node, such as a selector, a taint of the Node or a DeviceTaintRule."
        "Read the pods' FailedScheduling events; see that the scheduler does not run with DRAPartitionableDevices=false (its metric kubernetes_feature_enabled tells).";
}

/// Something that was found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Finding {
    pub(crate) kind: Kind,
    /// Which one, and what exactly was seen.
    pub(crate) detail: String,
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::fmt::Write;
    use std::path::Path;

    use super::*;

    /// The page that lists all findings.
    fn page() -> String {
        let mut page = String::from(
            "# kerf doctor\n\n`kerf doctor` looks at a node and says what keeps it from serving GPUs. It takes the root flags of\n\
             `kerf node` and changes nothing: it writes no file, makes no device node and changes no mode. (Opening NVIDIA's\n\
             library may load the kernel module, as `nvidia-smi` does.)\n\n\
             Exit code 0: no error was found. 1: at least one finding of severity error. What could not be looked at is\n\
             listed as skipped, with the reason. `--json` prints `{\"findings\": [{id, severity, what, detail, why, remedy}],\n\
             \"skipped\": [text]}`.\n\n\
             `--dump-nvml` looks for nothing and prints what the GPUs answer, in the format of the emulator's `models.json`.\n\
             Compute instance profiles and instance ids are those of the GPU instances that exist; `derived` names the rest.\n\n\
             containerd's configuration is read line by line: `enable_cdi` counts wherever it stands, files that are\n\
             imported are not followed.\n\n\
             <!-- Made from the table in kerf/src/doctor/finding.rs; a test compares them, and writes the page when\n\
             KERF_WRITE_DOCS=1 is set. -->\n",
        );
        for kind in Kind::ALL {
            let Row { id, severity, what, why, remedy } = kind.row();
            // Writing to a String cannot fail.
            let _ = write!(
                page,
                "\n## {id}\n\n{what} ({})\n\n- Why: {why}\n- What to do: {remedy}\n",
                severity.as_str()
            );
        }
        page
    }

    #[test]
    fn the_page_is_that_of_the_table() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/doctor.md");
        if std::env::var_os("KERF_WRITE_DOCS").is_some() {
            std::fs::write(&path, page()).expect("the page");
        }
        assert_eq!(std::fs::read_to_string(&path).expect("the page"), page());
    }

    #[test]
    fn ids_are_kebab_case_and_unique() {
        let ids: BTreeSet<&str> = Kind::ALL.iter().map(|kind| kind.row().id).collect();
        assert_eq!(ids.len(), Kind::ALL.len());
        assert!(ids.iter().all(|id| id.chars().all(|letter| letter.is_ascii_lowercase() || letter == '-')));
    }

    #[test]
    fn everything_that_can_be_found_is_staged_in_a_test() {
        let tests = include_str!("../../tests/it/doctor.rs");
        for kind in Kind::ALL {
            assert!(tests.contains(&format!("\"{}\"", kind.row().id)), "{} is not staged", kind.row().id);
        }
    }
}
