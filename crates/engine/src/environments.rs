//! Environments by name: presets, and artifacts from the configuration.

use std::{collections::BTreeMap, path::PathBuf};

use carrel_backend::{environment::Environment, host::Whereabouts, warm::Warmth};
use carrel_proto::{
    guest::Language,
    message::DEFAULT_UNDO,
    problem::{Code, Problem},
};
use serde::{Deserialize, Serialize};

/// Where an environment's software comes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Source {
    Preset(Language),
    Artifact(PathBuf),
}

/// The environments a caller can name.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Environments {
    sources: BTreeMap<String, Source>,
    /// How many calls can be taken back, where a caller does not say.
    #[serde(default)]
    undo_calls: BTreeMap<String, u32>,
    /// Whose interpreters presets mean.
    #[serde(default)]
    whereabouts: Whereabouts,
    /// Whether interpreters are copied from warm parents.
    #[serde(default)]
    warmth: Warmth,
}

impl Default for Environments {
    /// The presets, one per language, with what is in the usual places.
    fn default() -> Self {
        let sources = Language::ALL.map(|language| (language.as_str().to_owned(), Source::Preset(language)));
        Self {
            sources: sources.into(),
            undo_calls: BTreeMap::new(),
            whereabouts: Whereabouts::default(),
            warmth: Warmth::default(),
        }
    }
}

impl Environments {
    /// With the interpreters that somebody there means.
    #[must_use]
    pub fn at(self, whereabouts: Whereabouts) -> Self {
        Self { whereabouts, ..self }
    }

    pub fn whereabouts(&self) -> &Whereabouts {
        &self.whereabouts
    }

    pub fn add(&mut self, name: String, source: Source) {
        self.sources.insert(name, source);
    }

    pub fn set_undo_calls(&mut self, name: &str, calls: u32) {
        self.undo_calls.insert(name.to_owned(), calls);
    }

    /// How many calls can be taken back in a sandbox of this environment, if nobody says otherwise.
    pub fn undo_calls(&self, name: &str) -> u32 {
        self.undo_calls.get(name).copied().unwrap_or(DEFAULT_UNDO)
    }

    pub fn set_warmth(&mut self, warmth: Warmth) {
        self.warmth = warmth;
    }

    pub fn warmth(&self) -> &Warmth {
        &self.warmth
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.sources.keys().map(String::as_str)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&str, &Source)> {
        self.sources.iter().map(|(name, source)| (name.as_str(), source))
    }

    pub fn source(&self, name: &str) -> Result<&Source, Problem> {
        self.sources.get(name).ok_or_else(|| {
            let names: Vec<&str> = self.names().collect();
            Problem::new(Code::EnvironmentUnknown, format!("there is no environment `{name}`"))
                .hint(format!("available: {}", names.join(", ")))
        })
    }

    /// The software of an environment, looked up on this host: a preset's as somebody at `caller` means it.
    pub fn resolve(
        &self,
        name: &str,
        derived: &std::path::Path,
        caller: &Whereabouts,
    ) -> Result<Environment, Problem> {
        let found = match self.source(name)? {
            Source::Preset(language) => Environment::preset(name, *language, derived, caller),
            Source::Artifact(directory) => Environment::artifact(name, directory),
        };
        Ok(Environment { warmth: self.warmth.clone(), ..found? })
    }

    /// What code for environment `wanted` (or for none in particular) is written in, in a sandbox of environment `own`.
    pub fn language(&self, own: &str, wanted: Option<&str>) -> Result<Language, Problem> {
        match wanted {
            Some(wanted) if wanted == own => self.language_of(wanted),
            Some(wanted) => Language::parse(wanted).map_or_else(|| self.language_of(wanted), Ok),
            // Presets are one and the same software, so python is the default in all of them.
            None => match self.source(own)? {
                Source::Preset(_) => Ok(Language::Python),
                Source::Artifact(_) => self.language_of(own),
            },
        }
    }

    /// The language of a run in a sandbox that has to be made for it.
    pub fn first_language(&self, wanted: Option<&str>) -> Option<Language> {
        self.language(wanted.unwrap_or(crate::sandboxes::DEFAULT_ENVIRONMENT), wanted).ok()
    }

    fn language_of(&self, environment: &str) -> Result<Language, Problem> {
        match self.source(environment)? {
            Source::Preset(language) => Ok(*language),
            Source::Artifact(directory) => {
                Environment::artifact(environment, directory).map(|found| found.language)
            }
        }
    }

    /// Whether two names stand for the same software, so that one sandbox serves both.
    pub fn same_software(&self, one: &str, other: &str) -> bool {
        one == other
            || matches!(
                (self.sources.get(one), self.sources.get(other)),
                (Some(Source::Preset(_)), Some(Source::Preset(_)))
            )
    }
}
