//! Which sandbox a caller means: the key of a session name in the run that it is used in.
//!
//! In a workflow run all steps share one default sandbox, and a name gives a second one. An agent run by itself has its
//! own. `isolated` is a new one each time, below the same run, so that closing the run closes it too. Outside of runs
//! keys are the user's own.

use carrel_proto::{
    id::{Key, SessionName},
    problem::{Code, Problem},
};

use crate::{tenant::Tenant, tokens::random_text};

/// What a caller says of where it is.
#[derive(Debug, Clone, Default)]
pub struct RunContext {
    pub workflow_run: Option<String>,
    pub agent_run: Option<String>,
    pub tenant: Tenant,
}

/// Which sandbox of a run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Session {
    /// The one that all share.
    #[default]
    Default,
    /// A new one.
    Isolated,
    Named(SessionName),
}

impl Session {
    pub fn parse(text: &str) -> Result<Self, Problem> {
        Ok(match text {
            "default" => Session::Default,
            "isolated" => Session::Isolated,
            name => Session::Named(name.parse().map_err(|error: carrel_proto::id::BadName| {
                Problem::new(Code::InvalidArgument, error.to_string())
                    .hint("`default`, `isolated`, or a name of letters, digits, `.`, `_` and `-`")
            })?),
        })
    }
}

/// Scopes that carrel itself gives a meaning to.
pub const WORKFLOW: &str = "workflow";
pub const AGENT: &str = "agent";
pub const USER: &str = "user";

/// The key of a session in a run.
pub fn resolve(context: &RunContext, session: &Session) -> Result<Key, Problem> {
    let isolated = match session {
        Session::Isolated => Some(format!("isolated-{}", random_text(10)?)),
        _ => None,
    };
    let name = match (session, &isolated) {
        (Session::Named(name), _) => name.as_str(),
        (_, Some(name)) => name,
        _ => "default",
    };
    let (scope, owner) = match (&context.workflow_run, &context.agent_run) {
        (Some(run), _) => (WORKFLOW, run_id("workflow", run)?),
        (None, Some(run)) => (AGENT, run_id("agent", run)?),
        (None, None) => (USER, context.tenant.owner()),
    };
    format!("{scope}:{owner}:{name}").parse().map_err(Problem::internal)
}

/// A run's name is one part of a key: a colon in it would make it another's.
fn run_id<'a>(what: &str, run: &'a str) -> Result<&'a str, Problem> {
    run.parse::<SessionName>().map(|_| run).map_err(|_| {
        let shown: String = run.chars().take(80).collect();
        Problem::new(Code::InvalidArgument, format!("`{shown}` is not the id of a {what} run"))
            .hint("1 to 64 ASCII letters, digits, `.`, `_` and `-`")
    })
}

/// Whether a tenant may use a key that it wrote itself: three parts, and a token's `user:` keys are its own.
pub fn check(tenant: &Tenant, key: &Key) -> Result<(), Problem> {
    let parts: Vec<&str> = key.as_str().split(':').collect();
    if parts.len() != 3 || parts.iter().any(|part| part.parse::<SessionName>().is_err()) {
        return Err(Problem::new(Code::InvalidArgument, format!("`{key}` is not a key"))
            .hint("written `scope:owner:name`, such as `workflow:run_42:default`"));
    }
    if parts[0] == USER && !tenant.is_local() && parts[1] != tenant.owner() {
        return Err(Problem::new(Code::Forbidden, "a token's `user:` keys carry its own id")
            .hint(format!("use `user:{tenant}:{}`", parts[2])));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(workflow: Option<&str>, agent: Option<&str>, tenant: &str, session: &str) -> String {
        let context = RunContext {
            workflow_run: workflow.map(str::to_owned),
            agent_run: agent.map(str::to_owned),
            tenant: Tenant::stored(tenant.to_owned()),
        };
        resolve(&context, &Session::parse(session).unwrap()).unwrap().to_string()
    }

    #[test]
    fn the_rule() {
        assert_eq!(key(Some("run_1"), None, "", "default"), "workflow:run_1:default");
        assert_eq!(key(Some("run_1"), Some("step_9"), "tok_a", "default"), "workflow:run_1:default");
        assert_eq!(key(Some("run_1"), Some("step_9"), "", "db"), "workflow:run_1:db");
        assert_eq!(key(None, Some("run_7"), "", "default"), "agent:run_7:default");
        assert_eq!(key(None, Some("run_7"), "", "db"), "agent:run_7:db");
        assert_eq!(key(None, None, "", "default"), "user:local:default");
        assert_eq!(key(None, None, "tok_a", "analysis"), "user:tok_a:analysis");
    }

    #[test]
    fn isolated_is_a_new_one_of_the_same_run() {
        let one = key(Some("run_1"), None, "", "isolated");
        assert!(one.starts_with("workflow:run_1:isolated-"), "{one}");
        assert_ne!(one, key(Some("run_1"), None, "", "isolated"));
        assert!(key(None, Some("run_7"), "", "isolated").starts_with("agent:run_7:isolated-"));
        assert!(key(None, None, "tok_a", "isolated").starts_with("user:tok_a:isolated-"));
    }

    #[test]
    fn a_name_cannot_reach_into_another_run() {
        for run in ["a:b", "", "../x", "a b", &"x".repeat(65)] {
            let context = RunContext { workflow_run: Some(run.to_owned()), ..RunContext::default() };
            assert_eq!(resolve(&context, &Session::Default).unwrap_err().code, Code::InvalidArgument);
        }
        assert!(Session::parse("a:b").is_err() && Session::parse("").is_err());
        let longest = "x".repeat(64);
        assert_eq!(key(Some(&longest), None, "", &longest).len(), 9 + 64 + 1 + 64);
    }

    #[test]
    fn a_token_writes_only_its_own_user_keys() {
        let token = Tenant::stored("tok_a".to_owned());
        let verdict = |tenant: &Tenant, key: &str| check(tenant, &key.parse().unwrap()).map_err(|p| p.code);
        assert_eq!(verdict(&token, "user:tok_a:x"), Ok(()));
        assert_eq!(verdict(&token, "user:tok_b:x"), Err(Code::Forbidden));
        assert_eq!(verdict(&token, "user:local:x"), Err(Code::Forbidden));
        assert_eq!(verdict(&token, "workflow:run:x"), Ok(()));
        assert_eq!(verdict(&Tenant::local(), "user:tok_a:x"), Ok(()));
        for bad in ["x", "a:b", "a:b:c:d", "a::c", "a:b:"] {
            assert_eq!(verdict(&Tenant::local(), bad), Err(Code::InvalidArgument), "{bad}");
        }
    }
}
