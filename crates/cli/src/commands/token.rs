//! `carrel token`: made, listed and revoked in the registry itself, with or without a daemon.

use std::process::ExitCode;

use carrel_engine::{
    Engine,
    tokens::{NewToken, Token as Known},
};
use carrel_proto::problem::Problem;
use serde_json::{Value, json};

use crate::{
    args::{Token, TokenCreate},
    commands::ls::now_ms,
    config::Settings,
    output::{Output, short_time},
};

pub(crate) fn run(args: &Token, settings: Settings, output: &Output) -> Result<ExitCode, Problem> {
    let Settings { state, environments, .. } = settings;
    let engine = Engine::open(carrel_engine::Settings { state, environments })?;
    match args {
        Token::Create(args) => create(args, &engine, output)?,
        Token::List => list(&engine, output)?,
        Token::Revoke { id } => {
            let token = engine.revoke_token(id)?;
            if output.json {
                output.object(&object(&token))?;
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn create(args: &TokenCreate, engine: &Engine, output: &Output) -> Result<(), Problem> {
    let (token, secret) = engine.create_token(&NewToken {
        name: args.name.clone(),
        scopes: args.scope.clone(),
        quota: args.quota.unwrap_or_default(),
        expires_in: args.expires,
    })?;
    if output.json {
        let mut object = object(&token);
        object["token"] = json!(secret);
        return output.object(&object);
    }
    output.line(secret)?;
    output
        .note(format_args!("{} is shown this once; `carrel token revoke {}` ends it", token.name, token.id));
    Ok(())
}

fn list(engine: &Engine, output: &Output) -> Result<(), Problem> {
    let tokens = engine.tokens()?;
    if output.json {
        let all: Vec<Value> = tokens.iter().map(object).collect();
        return output.object(&json!({ "tokens": all }));
    }
    let now = now_ms();
    let ago =
        |then: Option<u64>| then.map_or("never".to_owned(), |then| short_time(now.saturating_sub(then)));
    let rows: Vec<Vec<String>> = tokens
        .iter()
        .map(|token| {
            vec![
                token.id.to_string(),
                token.name.clone(),
                token.scopes.to_string(),
                token.quota.to_string(),
                state(token, now),
                ago(token.used_unix_ms),
            ]
        })
        .collect();
    output.table(&["ID", "NAME", "SCOPE", "QUOTA", "STATE", "USED"], &rows)
}

fn state(token: &Known, now: u64) -> String {
    match token.expires_unix_ms {
        _ if token.revoked_unix_ms.is_some() => "revoked".to_owned(),
        None => "valid".to_owned(),
        Some(end) if end <= now => "expired".to_owned(),
        Some(end) => format!("valid for {}", short_time(end - now)),
    }
}

/// A token as `--json` shows it; the secret is not known any more.
fn object(token: &Known) -> Value {
    let quota = &token.quota;
    json!({
        "id": token.id,
        "name": token.name,
        "scope": token.scopes,
        "quota": {
            "sandboxes": quota.sandboxes,
            "cpu_millis": quota.cpu_millis,
            "memory": quota.memory,
            "disk": quota.disk,
            "rate": quota.rate,
        },
        "created_unix_ms": token.created_unix_ms,
        "expires_unix_ms": token.expires_unix_ms,
        "revoked_unix_ms": token.revoked_unix_ms,
        "used_unix_ms": token.used_unix_ms,
    })
}
