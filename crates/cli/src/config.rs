//! Settings from everywhere, with their origins: defaults, files, variables, flags, each over the one before.
//!
//! Nothing here reads the process's own environment: [`Surroundings`] carries it, so that tests can make one.

mod file;
mod keys;

use std::{
    collections::BTreeMap,
    ffi::OsString,
    fmt,
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

use carrel_api::mcp::ToolSet;
use carrel_backend::{IsolationLevel, Project, host::Whereabouts};
use carrel_engine::{Environments, Source, Warmth, Wish, pool::PoolSize};
use carrel_proto::{
    limits::{ByteSize, Limits},
    problem::{Code, Problem},
};

pub(crate) use keys::{Key, Value, time};

use file::Author;
use keys::nearest;

const FILE: &str = "carrel.toml";
const SYSTEM_FILE: &str = "/etc/carrel/carrel.toml";
const SYSTEM_STATE: &str = "/var/lib/carrel";
const SYSTEM_SOCKET: &str = "/run/carrel/carrel.sock";
const SOCKET: &str = "carrel.sock";
/// What other tools call the project's directory; weaker than carrel's own variable.
const PROJECT_DIR: &str = "PROJECT_DIR";

/// What a process finds around itself.
#[derive(Debug, Clone)]
pub(crate) struct Surroundings {
    pub(crate) variables: BTreeMap<OsString, OsString>,
    pub(crate) directory: PathBuf,
    pub(crate) root: bool,
}

impl Surroundings {
    pub(crate) fn of_this_process() -> Result<Self, Problem> {
        let directory = std::env::current_dir().map_err(|error| {
            Problem::new(Code::InvalidArgument, format!("the current directory: {error}"))
        })?;
        let root = rustix::process::geteuid().is_root();
        Ok(Self { variables: std::env::vars_os().collect(), directory, root })
    }

    /// A variable that names an absolute path.
    pub(crate) fn path(&self, name: &str) -> Option<PathBuf> {
        let value = self.variables.get(&OsString::from(name))?;
        Some(PathBuf::from(value)).filter(|path| path.is_absolute())
    }

    /// The directory that a variable names, or else one below the user's own.
    pub(crate) fn home(&self, variable: &str, below_home: &str) -> Option<PathBuf> {
        self.path(variable).or_else(|| Some(self.path("HOME")?.join(below_home)))
    }

    fn user_files(&self) -> Vec<PathBuf> {
        let system = self.root.then(|| PathBuf::from(SYSTEM_FILE));
        let own = self.home("XDG_CONFIG_HOME", ".config").map(|home| home.join("carrel").join(FILE));
        system.into_iter().chain(own).collect()
    }

    /// The nearest one above the current directory.
    fn project_file(&self) -> Option<PathBuf> {
        let known = self.user_files();
        let found =
            self.directory.ancestors().map(|directory| directory.join(FILE)).find(|file| file.is_file());
        found.filter(|file| !known.contains(file))
    }

    /// Where a daemon listens. `None`: below the state directory.
    fn socket(&self) -> Option<PathBuf> {
        if self.root {
            return Some(SYSTEM_SOCKET.into());
        }
        self.path("XDG_RUNTIME_DIR").map(|runtime| runtime.join("carrel").join(SOCKET))
    }

    fn state(&self) -> Result<PathBuf, Problem> {
        if self.root {
            return Ok(SYSTEM_STATE.into());
        }
        self.home("XDG_STATE_HOME", ".local/state").map(|home| home.join("carrel")).ok_or_else(|| {
            Problem::new(
                Code::Config,
                "there is no place for carrel's state: neither XDG_STATE_HOME nor HOME is set",
            )
            .hint("name one with --state DIR or CARREL_STATE")
        })
    }
}

/// Where a value came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Origin {
    Default,
    File(PathBuf, usize),
    Variable(String),
    Flag(&'static str),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::Default => f.write_str("default"),
            Origin::File(path, line) => write!(f, "{}:{line}", path.display()),
            Origin::Variable(name) => f.write_str(name),
            Origin::Flag(name) => f.write_str(name),
        }
    }
}

/// A setting as a flag said it.
#[derive(Debug, Clone)]
pub(crate) struct Flag {
    pub(crate) key: Key,
    pub(crate) name: &'static str,
    pub(crate) text: String,
}

/// Every setting with its origin.
#[derive(Debug)]
pub(crate) struct Config {
    values: BTreeMap<Key, (Value, Origin)>,
    environments: BTreeMap<String, (Source, Origin)>,
    /// Whose interpreters presets mean.
    whereabouts: Whereabouts,
    tools: BTreeMap<String, ToolSet>,
    /// Of environments that say how many calls can be taken back.
    undo_calls: BTreeMap<String, u32>,
    /// Files that were read.
    pub(crate) files: Vec<PathBuf>,
}

impl Config {
    /// Layer upon layer. With `only` that file takes the place of all others.
    pub(crate) fn load(around: &Surroundings, only: Option<&Path>, flags: &[Flag]) -> Result<Self, Problem> {
        let mut config = Self::defaults(around)?;
        match only {
            Some(path) => {
                let path = around.directory.join(path);
                if !config.add_file(&path, Author::User)? {
                    return Err(Problem::new(Code::Config, format!("{} does not exist", path.display()))
                        .hint("check the path after --config"));
                }
            }
            None => {
                for path in around.user_files() {
                    config.add_file(&path, Author::User)?;
                }
                if let Some(path) = around.project_file() {
                    config.add_file(&path, Author::Project)?;
                }
            }
        }
        config.add_variables(around)?;
        config.add_flags(around, flags)?;
        Ok(config)
    }

    fn defaults(around: &Surroundings) -> Result<Self, Problem> {
        let mut values = BTreeMap::new();
        for key in Key::ALL {
            if let Some(value) = key.default() {
                values.insert(key, (value, Origin::Default));
            }
        }
        if let Ok(state) = around.state() {
            values.insert(Key::State, (Value::Path(state), Origin::Default));
        }
        if let Some(socket) = around.socket() {
            values.insert(Key::ServeSocket, (Value::Path(socket), Origin::Default));
        }
        let environments = Environments::default();
        let presets =
            environments.iter().map(|(name, source)| (name.to_owned(), (source.clone(), Origin::Default)));
        Ok(Self {
            values,
            environments: presets.collect(),
            whereabouts: Whereabouts::of(around.variables.clone()),
            tools: BTreeMap::new(),
            undo_calls: BTreeMap::new(),
            files: Vec::new(),
        })
    }

    fn add_file(&mut self, path: &Path, author: Author) -> Result<bool, Problem> {
        let Some(said) = file::read(path, author)? else { return Ok(false) };
        for (key, value, line) in said.values {
            self.values.insert(key, (value, Origin::File(path.to_path_buf(), line)));
        }
        for (name, source, line) in said.environments {
            self.environments.insert(name, (source, Origin::File(path.to_path_buf(), line)));
        }
        self.tools.extend(said.tools);
        self.undo_calls.extend(said.undo_calls);
        self.files.push(path.to_path_buf());
        Ok(true)
    }

    fn add_variables(&mut self, around: &Surroundings) -> Result<(), Problem> {
        refuse_unknown_variables(around)?;
        let project = (Key::ProjectDirectory, PROJECT_DIR.to_owned());
        let own = Key::ALL.map(|key| (key, key.variable()));
        for (key, name) in std::iter::once(project).chain(own) {
            let Some(text) = around.variables.get(&OsString::from(&name)) else { continue };
            if text.is_empty() {
                continue;
            }
            let value = key.kind().parse(&text.to_string_lossy()).map_err(|why| {
                Problem::new(Code::Config, format!("{name}: {why}"))
                    .hint("docs/configuration.md lists what each setting may be")
            })?;
            self.values.insert(key, (absolute(around, value), Origin::Variable(name)));
        }
        Ok(())
    }

    fn add_flags(&mut self, around: &Surroundings, flags: &[Flag]) -> Result<(), Problem> {
        for flag in flags {
            let value = flag.key.kind().parse(&flag.text).map_err(|why| {
                Problem::new(Code::InvalidArgument, format!("{}: {why}", flag.name))
                    .hint("`carrel help` shows what each flag takes")
            })?;
            self.values.insert(flag.key, (absolute(around, value), Origin::Flag(flag.name)));
        }
        Ok(())
    }

    pub(crate) fn values(&self) -> impl Iterator<Item = (Key, &Value, &Origin)> {
        self.values.iter().map(|(key, (value, origin))| (*key, value, origin))
    }

    pub(crate) fn environments(&self) -> impl Iterator<Item = (&str, &Source, &Origin)> {
        self.environments.iter().map(|(name, (source, origin))| (name.as_str(), source, origin))
    }

    pub(crate) fn settings(&self) -> Result<Settings, Problem> {
        let mut environments = Environments::default().at(self.whereabouts.clone());
        for (name, (source, _)) in &self.environments {
            environments.add(name.clone(), source.clone());
            let own = self.undo_calls.get(name).copied();
            environments.set_undo_calls(name, own.unwrap_or_else(|| self.number(Key::UndoCalls)));
        }
        let parents = self.value(Key::WarmParents) == Some(&Value::Flag(true));
        let learn = self.value(Key::WarmLearn) == Some(&Value::Flag(true));
        environments.set_warmth(Warmth { on: parents, modules: self.list(Key::WarmModules), learn });
        // What a flag says holds for every environment.
        let flag = self.values.get(&Key::UndoCalls).filter(|(_, origin)| matches!(origin, Origin::Flag(_)));
        let undo_calls = flag.map(|_| self.number(Key::UndoCalls));
        let Some(state) = self.path(Key::State) else {
            return Err(Problem::new(Code::Config, "there is no place for carrel's state")
                .hint("name one with --state DIR or CARREL_STATE"));
        };
        let pool = PoolSize { floor: self.number(Key::PoolFloor), ceiling: self.number(Key::PoolCeiling) };
        if pool.floor > pool.ceiling {
            let word = format!("`pool.floor` is {}, more than `pool.ceiling`, {}", pool.floor, pool.ceiling);
            return Err(
                Problem::new(Code::Config, word).hint("set the ceiling at least as high as the floor")
            );
        }
        let listen = self.list(Key::ServeListen).iter().filter_map(|address| address.parse().ok()).collect();
        Ok(Settings {
            socket: self.path(Key::ServeSocket).unwrap_or_else(|| state.join("run").join(SOCKET)),
            serve: Serve {
                listen,
                tls_cert: self.path(Key::ServeTlsCert),
                tls_key: self.path(Key::ServeTlsSecret),
                allow_hosts: self.list(Key::ServeAllowHosts),
                allow_origins: self.list(Key::ServeAllowOrigins),
                public_url: self.text(Key::ServePublicUrl),
                audit: self.value(Key::ServeAudit) == Some(&Value::Flag(true)),
                pack_after: self.time(Key::ServePackAfter),
                otlp_endpoint: self.text(Key::OtlpEndpoint),
            },
            state,
            pool,
            environments,
            tools: self.tools.clone(),
            limits: Limits {
                cpu_millis: self.number(Key::Cpus),
                memory: self.size(Key::Memory),
                pids: self.number(Key::Pids),
                disk: self.size(Key::Disk),
                output: self.size(Key::Output),
                execs: self.number(Key::Execs),
            },
            timeout: self.time(Key::Timeout),
            idle_timeout: self.time(Key::IdleTimeout),
            max_lifetime: self.time(Key::MaxLifetime),
            standby_after: self.time(Key::StandbyAfter),
            hibernate_after: self.time(Key::HibernateAfter),
            undo_calls,
            isolation: match self.value(Key::Isolation) {
                Some(Value::Word("weak")) => IsolationLevel::Weak,
                _ => IsolationLevel::Jail,
            },
            project: self.project()?,
        })
    }

    fn project(&self) -> Result<Option<Project>, Problem> {
        let Some((Value::Path(path), origin)) = self.values.get(&Key::ProjectDirectory) else {
            return Ok(None);
        };
        let bad = |why: String| {
            Problem::new(
                Code::InvalidArgument,
                format!("the project directory {} ({origin}): {why}", path.display()),
            )
            .hint("name an existing directory with --project")
        };
        let directory = std::fs::canonicalize(path).map_err(|error| bad(error.to_string()))?;
        if !directory.is_dir() {
            return Err(bad("it is not a directory".to_owned()));
        }
        let writable = self.value(Key::ProjectWritable) == Some(&Value::Flag(true));
        Ok(Some(Project { directory, writable }))
    }

    fn value(&self, key: Key) -> Option<&Value> {
        self.values.get(&key).map(|(value, _)| value)
    }

    fn path(&self, key: Key) -> Option<PathBuf> {
        match self.value(key) {
            Some(Value::Path(path)) => Some(path.clone()),
            _ => None,
        }
    }

    fn list(&self, key: Key) -> Vec<String> {
        match self.value(key) {
            Some(Value::List(list)) => list.clone(),
            _ => Vec::new(),
        }
    }

    fn text(&self, key: Key) -> Option<String> {
        match self.value(key) {
            Some(Value::Text(text)) => Some(text.clone()),
            _ => None,
        }
    }

    fn number(&self, key: Key) -> u32 {
        match self.value(key) {
            Some(Value::Count(number) | Value::Cpus(number)) => *number,
            _ => 0,
        }
    }

    fn size(&self, key: Key) -> ByteSize {
        match self.value(key) {
            Some(Value::Size(size)) => *size,
            _ => ByteSize(0),
        }
    }

    fn time(&self, key: Key) -> Duration {
        match self.value(key) {
            Some(Value::Time(time)) => *time,
            _ => Duration::ZERO,
        }
    }
}

/// A slip in a variable's name would otherwise go unnoticed. Variables of other sections belong to other programs.
fn refuse_unknown_variables(around: &Surroundings) -> Result<(), Problem> {
    let known = Key::ALL.map(Key::variable);
    for name in around.variables.keys().filter_map(|name| name.to_str()) {
        let ours = Key::SECTIONS
            .iter()
            .any(|section| name.starts_with(&format!("CARREL_{}_", section.to_ascii_uppercase())));
        if ours && !known.iter().any(|known| known == name) {
            let problem = Problem::new(Code::Config, format!("there is no setting for the variable {name}"));
            return Err(match nearest(name, known.iter().map(String::as_str)) {
                Some(near) => problem.hint(format!("did you mean {near}?")),
                None => problem.hint("docs/configuration.md lists the variables"),
            });
        }
    }
    Ok(())
}

fn absolute(around: &Surroundings, value: Value) -> Value {
    match value {
        Value::Path(path) => Value::Path(around.directory.join(path)),
        other => other,
    }
}

/// How `carrel serve` opens its doors.
#[derive(Debug, Clone, Default)]
pub(crate) struct Serve {
    pub(crate) listen: Vec<SocketAddr>,
    pub(crate) tls_cert: Option<PathBuf>,
    pub(crate) tls_key: Option<PathBuf>,
    pub(crate) allow_hosts: Vec<String>,
    pub(crate) allow_origins: Vec<String>,
    pub(crate) public_url: Option<String>,
    pub(crate) audit: bool,
    /// Zero: never.
    pub(crate) pack_after: Duration,
    pub(crate) otlp_endpoint: Option<String>,
}

/// Settings as meant.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) state: PathBuf,
    /// Where a daemon listens, if there is one.
    pub(crate) socket: PathBuf,
    pub(crate) serve: Serve,
    /// What a daemon keeps ready.
    pub(crate) pool: PoolSize,
    pub(crate) environments: Environments,
    /// What `carrel mcp` offers for an environment.
    pub(crate) tools: BTreeMap<String, ToolSet>,
    pub(crate) limits: Limits,
    pub(crate) timeout: Duration,
    pub(crate) idle_timeout: Duration,
    pub(crate) max_lifetime: Duration,
    /// Zero: never.
    pub(crate) standby_after: Duration,
    pub(crate) hibernate_after: Duration,
    /// As a flag says it.
    pub(crate) undo_calls: Option<u32>,
    pub(crate) isolation: IsolationLevel,
    pub(crate) project: Option<Project>,
}

impl Settings {
    /// What a new sandbox shall be.
    pub(crate) fn wish(&self, environment: Option<&str>) -> Wish {
        Wish {
            environment: environment.map(str::to_owned),
            limits: self.limits.clone(),
            isolation: self.isolation,
            project: self.project.clone(),
            // Rounded up: a part of a second is not nothing.
            idle_timeout_s: self.idle_timeout.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX),
            max_lifetime_s: self.max_lifetime.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX),
            standby_after_s: self.standby_after.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX),
            hibernate_after_s: self.hibernate_after.as_millis().div_ceil(1000).try_into().unwrap_or(u64::MAX),
            undo_calls: self.undo_calls,
            ..Wish::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(directory: &Path, variables: &[(&str, &str)]) -> Surroundings {
        let mut all: BTreeMap<OsString, OsString> =
            variables.iter().map(|(name, value)| (OsString::from(name), OsString::from(value))).collect();
        all.entry("HOME".into()).or_insert_with(|| directory.join("home").into());
        Surroundings { variables: all, directory: directory.join("src/deep"), root: false }
    }

    fn write(directory: &Path, name: &str, text: &str) {
        let path = directory.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }

    fn origin(config: &Config, key: Key) -> String {
        let (value, origin) = &config.values[&key];
        format!("{value} from {origin}")
    }

    #[test]
    fn each_layer_goes_over_the_one_before() {
        let place = tempfile::tempdir().unwrap();
        let at = std::fs::canonicalize(place.path()).unwrap();
        write(
            &at,
            "home/.config/carrel/carrel.toml",
            "[limits]\nmemory = \"1GB\"\npids = 10\ncpus = 1\ndisk = \"2GB\"\n",
        );
        write(&at, "src/carrel.toml", "[limits]\npids = 20\ncpus = 2\ndisk = \"3GB\"\n");
        std::fs::create_dir_all(at.join("src/deep")).unwrap();
        let around = around(&at, &[("CARREL_LIMITS_CPUS", "3"), ("CARREL_LIMITS_DISK", "4GB")]);
        let flag = Flag { key: Key::Disk, name: "--disk", text: "5GB".into() };
        let config = Config::load(&around, None, &[flag]).unwrap();
        let user = at.join("home/.config/carrel/carrel.toml").display().to_string();
        let project = at.join("src/carrel.toml").display().to_string();
        assert_eq!(origin(&config, Key::Memory), format!("1 GB from {user}:2"));
        assert_eq!(origin(&config, Key::Pids), format!("20 from {project}:2"));
        assert_eq!(origin(&config, Key::Cpus), "3 from CARREL_LIMITS_CPUS");
        assert_eq!(origin(&config, Key::Disk), "5 GB from --disk");
        assert_eq!(origin(&config, Key::Execs), "64 from default");
        let state = at.join("home/.local/state/carrel").display().to_string();
        assert_eq!(origin(&config, Key::State), format!("{state} from default"));
    }

    #[test]
    fn a_misspelt_variable_is_an_error() {
        let place = tempfile::tempdir().unwrap();
        let around = around(place.path(), &[("CARREL_LIMITS_MEMROY", "1GB")]);
        let problem = Config::load(&around, None, &[]).unwrap_err();
        assert_eq!(problem.hint, "did you mean CARREL_LIMITS_MEMORY?");
    }

    #[test]
    fn a_file_that_was_named_must_exist_and_stands_alone() {
        let place = tempfile::tempdir().unwrap();
        write(place.path(), "home/.config/carrel/carrel.toml", "[limits]\npids = 10\n");
        write(place.path(), "src/deep/other.toml", "[limits]\nexecs = 3\n");
        let around = around(place.path(), &[]);
        assert!(Config::load(&around, Some(Path::new("missing.toml")), &[]).is_err());
        let settings = Config::load(&around, Some(Path::new("other.toml")), &[]).unwrap().settings().unwrap();
        assert_eq!((settings.limits.execs, settings.limits.pids), (3, 256));
    }

    #[test]
    fn an_environment_says_how_many_calls_can_be_taken_back() {
        let place = tempfile::tempdir().unwrap();
        let text = "[session]\nundo_calls = 5\n[environments.js]\npreset = \"node\"\nundo_calls = 0\n";
        write(place.path(), "home/.config/carrel/carrel.toml", text);
        let settings = |flags: &[Flag]| {
            Config::load(&around(place.path(), &[]), None, flags).unwrap().settings().unwrap()
        };
        let plain = settings(&[]);
        assert_eq!((plain.environments.undo_calls("python"), plain.environments.undo_calls("js")), (5, 0));
        assert_eq!(plain.wish(None).undo_calls, None, "the environment decides");
        let flag = Flag { key: Key::UndoCalls, name: "--undo-calls", text: "7".into() };
        assert_eq!(settings(&[flag]).wish(Some("js")).undo_calls, Some(7), "unless a flag says it");
    }

    #[test]
    fn a_pool_has_a_floor_below_its_ceiling() {
        let place = tempfile::tempdir().unwrap();
        let pool = |variables: &[(&str, &str)]| {
            Config::load(&around(place.path(), variables), None, &[])?
                .settings()
                .map(|settings| settings.pool)
        };
        assert_eq!(pool(&[]).unwrap(), PoolSize::default());
        assert_eq!(pool(&[("CARREL_POOL_FLOOR", "3")]).unwrap().floor, 3);
        let problem = pool(&[("CARREL_POOL_FLOOR", "3"), ("CARREL_POOL_CEILING", "2")]).unwrap_err();
        assert!(problem.message.contains("`pool.ceiling`, 2"), "{problem}");
        assert!(pool(&[("CARREL_POOL_CEILING", "1001")]).unwrap_err().message.contains("0 to 1000"));
        assert!(pool(&[("CARREL_POOL_CELING", "1")]).unwrap_err().hint.contains("CARREL_POOL_CEILING"));
        // Whoever wrote a project does not decide what a daemon keeps in memory.
        write(place.path(), "src/carrel.toml", "[pool]\nfloor = 1\n");
        std::fs::create_dir_all(place.path().join("src/deep")).unwrap();
        assert!(pool(&[]).unwrap_err().message.contains("cannot be set by a project"));
    }

    #[test]
    fn the_project_comes_from_its_variable() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().to_str().unwrap();
        let settings = |variables: &[(&str, &str)]| {
            Config::load(&around(place.path(), variables), None, &[])?.settings()
        };
        let project = settings(&[("PROJECT_DIR", directory)]).unwrap().project.unwrap();
        assert!(!project.writable);
        assert!(settings(&[("PROJECT_DIR", "/does/not/exist")]).unwrap_err().message.contains("PROJECT_DIR"));
        assert!(settings(&[]).unwrap().project.is_none());
    }
}
