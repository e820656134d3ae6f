//! The table of probes: what there is to try, in the order in which it is listed and run.

use crate::facts::Facts;
use crate::outcome::Outcome;
use crate::{descriptors, devices, exhaustion, host_files, kernel, network, processes, sessions};
use serde::Serialize;

/// `light` probes are quick and take next to nothing; `heavy` ones push against a limit and run one by one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Weight {
    Light,
    Heavy,
}

pub(crate) type Attack = fn(&Facts) -> Outcome;

/// One attack. Names are stable: reports and tests refer to them.
#[derive(Debug)]
pub(crate) struct Probe {
    pub(crate) name: &'static str,
    pub(crate) title: &'static str,
    /// Facts without which it cannot be tried.
    pub(crate) needs: &'static [&'static str],
    pub(crate) weight: Weight,
    pub(crate) attack: Attack,
}

impl Probe {
    pub(crate) const fn light(name: &'static str, title: &'static str, attack: Attack) -> Self {
        Probe { name, title, needs: &[], weight: Weight::Light, attack }
    }

    pub(crate) const fn heavy(name: &'static str, title: &'static str, attack: Attack) -> Self {
        Probe { name, title, needs: &["confirmed_box"], weight: Weight::Heavy, attack }
    }

    pub(crate) const fn needs(self, needs: &'static [&'static str]) -> Self {
        Probe { needs, ..self }
    }
}

/// Probes by group; a group may be spread over several files.
pub(crate) const GROUPS: &[(&str, &[&[Probe]])] = &[
    ("host-files", &[host_files::PROBES, host_files::mounts::PROBES, host_files::writes::PROBES]),
    ("processes", &[processes::PROBES, processes::init::PROBES, processes::runner::PROBES]),
    ("kernel", &[kernel::PROBES, kernel::state::PROBES, kernel::privilege::PROBES]),
    ("network", &[network::PROBES, network::families::PROBES]),
    ("devices", &[devices::PROBES]),
    ("descriptors", &[descriptors::PROBES]),
    ("sessions", &[sessions::PROBES]),
    ("exhaustion", &[exhaustion::PROBES, exhaustion::storage::PROBES, exhaustion::objects::PROBES]),
];

/// Every probe with the name of its group.
pub(crate) fn all() -> impl Iterator<Item = (&'static str, &'static Probe)> {
    GROUPS.iter().flat_map(|(group, files)| files.iter().copied().flatten().map(move |probe| (*group, probe)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::facts::KNOWN;
    use std::collections::BTreeSet;

    #[test]
    fn names_are_unique_and_kebab_case() {
        let mut seen = BTreeSet::new();
        for (_, probe) in all() {
            assert!(seen.insert(probe.name), "{} appears twice", probe.name);
            assert!(
                probe.name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-'),
                "{} is not kebab-case",
                probe.name
            );
        }
        assert!(seen.len() >= 75, "only {} probes", seen.len());
    }

    #[test]
    fn every_group_has_several_probes() {
        for (group, files) in GROUPS {
            assert!(files.iter().map(|file| file.len()).sum::<usize>() >= 5, "{group} is thin");
        }
        let names: Vec<&str> = GROUPS.iter().map(|(name, _)| *name).collect();
        assert_eq!(
            names,
            [
                "host-files",
                "processes",
                "kernel",
                "network",
                "devices",
                "descriptors",
                "sessions",
                "exhaustion"
            ]
        );
    }

    #[test]
    fn needed_facts_are_known_and_heavy_ones_need_a_confirmed_box() {
        for (group, probe) in all() {
            for need in probe.needs {
                assert!(KNOWN.iter().any(|(key, _)| key == need), "{} needs unknown {need}", probe.name);
            }
            assert_eq!(group == "exhaustion", probe.weight == Weight::Heavy, "{}", probe.name);
            assert!(!probe.title.is_empty());
            if probe.weight == Weight::Heavy {
                assert!(probe.needs.contains(&"confirmed_box"), "{}", probe.name);
            }
        }
    }
}
