//! `carrel serve`: the daemon.
//!
//! Drawn as a life: doors open → ready (told to systemd) → serving, SIGHUP reads the configuration again → SIGTERM or SIGINT:
//! draining (answers under way are finished) → gone. A second signal ends it at once. Sandboxes live on in every case: their
//! agents are nobody's children, and the next daemon, or the next command, finds them in the registry.

mod claim;
mod doors;
mod notify;
mod socket;
mod tls;

use std::{net::SocketAddr, process::ExitCode, sync::Arc, time::Duration};

use carrel_api::{
    rest::{Daemon, Defaults, Guards, Options},
    telemetry::Telemetry,
};
use carrel_engine::{
    Engine,
    journal::{Journal, Rotation},
    keeper::{Keeper, ROUND},
};
use carrel_proto::problem::{Code, Problem};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    task::JoinHandle,
};

use self::tls::Tls;
use crate::{
    args::Cli,
    args::Serve,
    commands::{log, pool::Pool},
    config::Config,
    config::Settings,
    config::Surroundings,
    output::Output,
};

/// What has ended is cleaned up this often. Calls do not wait for it: whoever meets a dead sandbox sees to it at once.
const SWEEP: Duration = Duration::from_secs(30);

pub(crate) async fn run(
    cli: &Cli,
    args: &Serve,
    settings: Settings,
    around: &Surroundings,
    output: &Output,
) -> Result<ExitCode, Problem> {
    log(output.verbose);
    // Before anything takes time: a signal that comes meanwhile is not the end of a half-opened daemon.
    let mut signals = Signals::listen()?;
    loopback_only(args, settings.serve.listen.iter().copied())?;
    let tls = Tls::open(settings.serve.tls_cert.as_deref(), settings.serve.tls_key.as_deref())?;
    raise_descriptors();
    // Before the doors: whoever is not to serve this directory takes nobody's socket.
    let claim = claim::Claim::take(&settings.state)?;
    let doors = doors::open(&settings, tls.as_ref().map(Tls::acceptor), output).await?;
    // Also those that systemd handed over.
    loopback_only(args, doors.addresses()?.into_iter())?;
    let guards = guards(args, &settings);
    let engine = open_engine(&settings).await?;
    let daemon = Daemon::new(engine.clone(), options(&settings, guards)?);
    let sweeping = tokio::spawn(sweep(engine.clone()));
    let pack_after = Some(settings.serve.pack_after).filter(|time| !time.is_zero());
    let keeping = tokio::spawn(keep(engine.clone(), Keeper::new(pack_after)));
    let pool = Pool::keep(&engine, &settings);
    let mut serving = tokio::spawn({
        let daemon = Arc::clone(&daemon);
        async move { daemon.serve(doors.listeners).await }
    });
    notify::ready();
    let ended = loop {
        tokio::select! {
            ended = &mut serving => break ended.map_err(Problem::internal)?,
            told = signals.next() => match told {
                Told::Reload => reload(cli, around, &engine, &daemon, tls.as_ref()),
                Told::Stop => break finish(&daemon, serving, signals).await?,
            },
        }
    };
    sweeping.abort();
    // At any point: what it was doing is found half done, or done.
    keeping.abort();
    pool.end().await;
    if let Some(journal) = engine.events().journal() {
        journal.flush();
    }
    drop(doors.socket);
    drop(claim);
    ended.map(|()| ExitCode::SUCCESS)
}

/// Drains, or is told a second time not to.
async fn finish(
    daemon: &Daemon,
    mut serving: JoinHandle<Result<(), Problem>>,
    mut signals: Signals,
) -> Result<Result<(), Problem>, Problem> {
    tracing::info!("shutting down; sandboxes stay alive");
    notify::stopping();
    daemon.stop();
    loop {
        tokio::select! {
            ended = &mut serving => return ended.map_err(Problem::internal),
            told = signals.next() => if told == Told::Stop {
                serving.abort();
                return Ok(Ok(()));
            },
        }
    }
}

/// Whoever asks for no token is to be reached from this host alone.
fn loopback_only(args: &Serve, mut addresses: impl Iterator<Item = SocketAddr>) -> Result<(), Problem> {
    let outside = addresses.find(|address| !address.ip().to_canonical().is_loopback());
    match (args.insecure_no_auth, outside) {
        (true, Some(address)) => {
            let word = format!("--insecure-no-auth is for the loopback, and {address} is not");
            Err(Problem::new(Code::InvalidArgument, word).hint("use tokens, or listen on 127.0.0.1"))
        }
        _ => Ok(()),
    }
}

fn guards(args: &Serve, settings: &Settings) -> Guards {
    Guards {
        no_auth: args.insecure_no_auth,
        hosts: settings.serve.allow_hosts.clone(),
        origins: settings.serve.allow_origins.clone(),
    }
}

async fn open_engine(settings: &Settings) -> Result<Engine, Problem> {
    let (state, environments) = (settings.state.clone(), settings.environments.clone());
    let opened =
        tokio::task::spawn_blocking(move || Engine::open(carrel_engine::Settings { state, environments }));
    let engine = opened.await.map_err(Problem::internal)??;
    let path = engine.state_directory().join("events.jsonl");
    engine.events().keep(journal(&path)?);
    Ok(engine)
}

fn journal(path: &std::path::Path) -> Result<Journal, Problem> {
    Journal::open(path, Rotation::default())
        .map_err(|error| Problem::internal(format!("{}: {error}", path.display())))
}

fn options(settings: &Settings, guards: Guards) -> Result<Options, Problem> {
    let audit = settings.serve.audit.then(|| journal(&settings.state.join("audit.jsonl"))).transpose()?;
    let telemetry = settings.serve.otlp_endpoint.as_deref().map(Telemetry::start).transpose()?;
    let public_url = settings.serve.public_url.clone();
    Ok(Options { guards, defaults: defaults(settings), audit, public_url, telemetry })
}

fn defaults(settings: &Settings) -> Defaults {
    Defaults { wish: settings.wish(None), timeout: settings.timeout }
}

/// Reads the configuration again. One with a mistake changes nothing.
fn reload(cli: &Cli, around: &Surroundings, engine: &Engine, daemon: &Daemon, tls: Option<&Tls>) {
    notify::reloading();
    let settings =
        Config::load(around, cli.global.config.as_deref(), &cli.flags()).and_then(|config| config.settings());
    match settings {
        Ok(settings) => {
            daemon.reload(defaults(&settings));
            let usual = settings.wish(None);
            engine.set_environments(settings.environments);
            engine.set_pool(settings.pool, &usual);
            tracing::info!("the configuration was read again");
        }
        Err(problem) => tracing::error!("the configuration stays as it was: {problem}"),
    }
    match tls.map(Tls::read_again) {
        Some(Ok(())) => tracing::info!("the certificates were read again"),
        Some(Err(problem)) => tracing::error!("the certificates stay as they were: {problem}"),
        None => {}
    }
    notify::ready();
}

async fn sweep(engine: Engine) {
    let mut ticks = tokio::time::interval(SWEEP);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(problem) = engine.tidy().await {
            tracing::warn!("cleaning up: {problem}");
        }
    }
}

/// Puts idle sandboxes to sleep, and packs what sleeps for long.
async fn keep(engine: Engine, mut keeper: Keeper) {
    let mut ticks = tokio::time::interval(ROUND);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        if let Err(problem) = Box::pin(keeper.round(&engine)).await {
            tracing::warn!("putting sandboxes to sleep: {problem}");
        }
    }
}

/// Every connection is a descriptor, and most of them two: the soft limit is meant for programs that use `select`.
fn raise_descriptors() {
    let Rlimit { maximum, .. } = getrlimit(Resource::Nofile);
    // Fewer connections are no reason not to start.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum });
}

/// What a signal means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Told {
    Reload,
    Stop,
}

#[derive(Debug)]
struct Signals {
    int: Signal,
    term: Signal,
    hangup: Signal,
}

impl Signals {
    fn listen() -> Result<Self, Problem> {
        let listen =
            |kind| signal(kind).map_err(|error| Problem::internal(format!("listening for signals: {error}")));
        Ok(Self {
            int: listen(SignalKind::interrupt())?,
            term: listen(SignalKind::terminate())?,
            hangup: listen(SignalKind::hangup())?,
        })
    }

    /// Safe to drop while it waits.
    async fn next(&mut self) -> Told {
        tokio::select! {
            Some(()) = self.int.recv() => Told::Stop,
            Some(()) = self.term.recv() => Told::Stop,
            Some(()) = self.hangup.recv() => Told::Reload,
            else => std::future::pending().await,
        }
    }
}
