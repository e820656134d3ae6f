//! host-files, the mount side: changing what the box sees by mounting, unmounting, moving its root.
//!
//! A mount that succeeds is gone with the step's process only when it has its own mount namespace, so every
//! attack mounts onto a directory of its own and says so.

use crate::facts::Facts;
use crate::isolate::{all_refused, step};
use crate::look;
use crate::outcome::{Outcome, REFUSED, expect_errno, merge, none_found, skipped};
use crate::sys::{NULL, sys};
use crate::table::Probe;
use rustix::io::Errno;
use std::ffi::{CStr, CString};
use std::fs;

pub(crate) const PROBES: &[Probe] = &[
    Probe::light("mount-bind", "bind-mount a directory", |_| {
        on_own_directory(&|at| {
            vec![
                mount("mount(bind /)", c"/", at, NONE, libc::MS_BIND),
                mount("mount(rbind /proc)", c"/proc", at, NONE, libc::MS_BIND | libc::MS_REC),
            ]
        })
    }),
    Probe::light("mount-tmpfs", "mount a fresh file system", |_| {
        on_own_directory(&|at| {
            vec![
                mount("mount(tmpfs)", c"none", at, c"tmpfs", 0),
                mount("mount(ramfs)", c"none", at, c"ramfs", 0),
            ]
        })
    }),
    Probe::light("mount-proc", "mount a second /proc or /sys without masks", |_| {
        on_own_directory(&|at| {
            vec![
                mount("mount(proc)", c"proc", at, c"proc", 0),
                mount("mount(sysfs)", c"sysfs", at, c"sysfs", 0),
                mount("mount(devpts)", c"devpts", at, c"devpts", 0),
                mount("mount(mqueue)", c"mqueue", at, c"mqueue", 0),
                mount("mount(securityfs)", c"none", at, c"securityfs", 0),
                mount("mount(debugfs)", c"none", at, c"debugfs", 0),
            ]
        })
    }),
    Probe::light("mount-overlay", "mount an overlay over system directories", |_| {
        on_own_directory(&|at| {
            let options = c"lowerdir=/usr:/etc";
            vec![step("mount(overlay)", || {
                expect_errno(
                    "mount(overlay)",
                    sys!(SYS_mount, c"overlay", at, c"overlay", 0, options),
                    REFUSED,
                )
            })]
        })
    }),
    Probe::light("mount-block-device", "mount the host's disks", mount_block_device),
    Probe::light("mount-propagation", "make the root mount shared to push mounts out", |_| {
        merge([mount("mount(make-rshared /)", c"none", c"/", NONE, libc::MS_SHARED | libc::MS_REC)])
    }),
    Probe::light("remount-rw", "remount read-only places writable", remount_rw),
    Probe::light("umount-overmounts", "unmount what hides parts of /proc and /dev", umount_overmounts),
    Probe::light("pivot-root", "move the root once more", pivot_root),
    Probe::light("mount-api-fsopen", "mount through fsopen and fspick", mount_api_fsopen),
    Probe::light("mount-api-trees", "clone, move and change mounts through descriptors", mount_api_trees),
    Probe::light("writable-mounts", "find mounts that are writable and should not be", writable_mounts),
];

const NONE: &CStr = c"";
const OPEN_TREE_CLONE: u32 = 1;
const AT_RECURSIVE: u32 = 0x8000;
const MOVE_MOUNT_F_EMPTY_PATH: u32 = 4;

fn mount(what: &str, source: &CStr, at: &CStr, kind: &CStr, flags: u64) -> Outcome {
    step(what, || expect_errno(what, sys!(SYS_mount, source, at, kind, flags, NULL), REFUSED))
}

/// Runs attacks on a directory of their own and removes it (and any mount that stuck) afterwards.
fn on_own_directory(attacks: &dyn Fn(&CStr) -> Vec<Outcome>) -> Outcome {
    let Some(dir) = look::scratch() else { return skipped("no directory to mount on") };
    let point = look::fresh(&dir, "mount");
    if let Err(error) = fs::create_dir(&point) {
        return skipped(format!("mkdir: {error}"));
    }
    let Ok(at) = CString::new(point.as_os_str().as_encoded_bytes()) else { return skipped("bad path") };
    let outcomes = attacks(&at);
    if outcomes.iter().any(|outcome| outcome.detail.ends_with("succeeded")) {
        let _ = step("umount", || {
            let _ = sys!(SYS_umount2, at.as_c_str(), libc::MNT_DETACH);
            skipped("cleaned up")
        });
    }
    let _ = fs::remove_dir(&point);
    merge(outcomes)
}

fn mount_block_device(_: &Facts) -> Outcome {
    on_own_directory(&|at| {
        let devices = [
            c"/dev/sda",
            c"/dev/sda1",
            c"/dev/vda",
            c"/dev/vda1",
            c"/dev/nvme0n1",
            c"/dev/root",
            c"/dev/dm-0",
        ];
        devices
            .iter()
            .map(|device| {
                mount(&format!("mount({})", device.to_string_lossy()), device, at, c"ext4", libc::MS_RDONLY)
            })
            .collect()
    })
}

fn remount_rw(_: &Facts) -> Outcome {
    let read_only: Vec<String> =
        look::mounts().into_iter().filter(|mount| mount.has("ro")).map(|mount| mount.point).collect();
    if read_only.is_empty() {
        return skipped("no read-only mount to remount");
    }
    merge(read_only.iter().take(24).filter_map(|point| {
        let at = CString::new(point.as_bytes()).ok()?;
        let bind =
            mount(&format!("remount,bind,rw {point}"), NONE, &at, NONE, libc::MS_REMOUNT | libc::MS_BIND);
        let plain = mount(&format!("remount,rw {point}"), NONE, &at, NONE, libc::MS_REMOUNT);
        let attr = step("mount_setattr", || {
            let mut change = [0_u8; 32];
            change[8..16].copy_from_slice(&1_u64.to_ne_bytes()); // attr_clr = MOUNT_ATTR_RDONLY
            let result = sys!(SYS_mount_setattr, libc::AT_FDCWD, at.as_c_str(), 0, &change, 32);
            expect_errno(&format!("mount_setattr(-ro {point})"), result, REFUSED)
        });
        Some(merge([bind, plain, attr]))
    }))
}

/// `MNT_EXPIRE` only marks a mount on the first call (EAGAIN) or finds it busy (EBUSY): both tell that the
/// right to unmount is there, and neither takes anything away.
fn umount_overmounts(_: &Facts) -> Outcome {
    let mut points: Vec<String> = look::mounts().into_iter().map(|mount| mount.point).collect();
    points.retain(|point| ["/proc", "/dev", "/sys", "/run", "/etc"].iter().any(|top| point.starts_with(top)));
    points.push("/".to_owned());
    merge(points.iter().take(40).filter_map(|point| {
        let at = CString::new(point.as_bytes()).ok()?;
        let what = format!("umount {point}");
        Some(step(&what, || expect_errno(&what, sys!(SYS_umount2, at.as_c_str(), libc::MNT_EXPIRE), REFUSED)))
    }))
}

/// Root onto itself: stacks rather than replaces, so that a success breaks nothing.
fn pivot_root(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("pivot_root(., .)", &|| sys!(SYS_pivot_root, c".", c".")),
            ("pivot_root(/workspace, /workspace)", &|| sys!(SYS_pivot_root, c"/workspace", c"/workspace")),
        ],
        REFUSED,
    )
}

fn mount_api_fsopen(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("fsopen(tmpfs)", &|| sys!(SYS_fsopen, c"tmpfs", 0)),
            ("fsopen(proc)", &|| sys!(SYS_fsopen, c"proc", 0)),
            ("fsopen(cgroup2)", &|| sys!(SYS_fsopen, c"cgroup2", 0)),
            ("fspick(/)", &|| sys!(SYS_fspick, libc::AT_FDCWD, c"/", 0)),
            ("fsmount", &|| sys!(SYS_fsmount, -1, 0, 0)),
        ],
        REFUSED,
    )
}

fn mount_api_trees(_: &Facts) -> Outcome {
    all_refused(
        &[
            ("open_tree(clone /)", &|| sys!(SYS_open_tree, libc::AT_FDCWD, c"/", OPEN_TREE_CLONE)),
            ("open_tree(clone -r /proc)", &|| {
                sys!(SYS_open_tree, libc::AT_FDCWD, c"/proc", OPEN_TREE_CLONE | AT_RECURSIVE)
            }),
            ("move_mount", &|| {
                sys!(
                    SYS_move_mount,
                    libc::AT_FDCWD,
                    c"/tmp",
                    libc::AT_FDCWD,
                    c"/tmp",
                    MOVE_MOUNT_F_EMPTY_PATH
                )
            }),
            ("mount_setattr", &|| {
                let nothing = [0_u8; 32];
                sys!(SYS_mount_setattr, libc::AT_FDCWD, c"/", 0, &nothing, 32).and_then(|returned| {
                    // An empty change is accepted from anyone; a real one must not be.
                    let mut change = nothing;
                    change[8..16].copy_from_slice(&2_u64.to_ne_bytes()); // attr_clr = MOUNT_ATTR_NOSUID
                    sys!(SYS_mount_setattr, libc::AT_FDCWD, c"/", 0, &change, 32).map(|_| returned)
                })
            }),
        ],
        REFUSED,
    )
}

fn writable_mounts(_: &Facts) -> Outcome {
    let mounts = look::mounts();
    if mounts.is_empty() {
        return skipped("/proc/self/mountinfo is not readable");
    }
    // Writable to the kernel is not yet writable to us: the file's own permissions count too.
    let found: Vec<String> = mounts
        .iter()
        .filter(|mount| mount.writable() && !look::WRITABLE.contains(&mount.point.as_str()))
        .filter(|mount| mount.kind != "proc" && !mount.point.starts_with("/dev") && !mount.is_mask())
        .filter(|mount| rustix::fs::access(&mount.point, rustix::fs::Access::WRITE_OK) != Err(Errno::ROFS))
        .filter(|mount| rustix::fs::access(&mount.point, rustix::fs::Access::WRITE_OK).is_ok())
        .map(|mount| format!("{} ({})", mount.point, mount.kind))
        .collect();
    none_found("unexpected writable mounts", &found)
}
