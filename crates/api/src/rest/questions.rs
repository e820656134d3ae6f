//! Query parameters where none are taken. Handlers that take some refuse the ones that they do not know; this refuses all for the rest,
//! so that a misspelt parameter is an error everywhere.

use std::collections::HashSet;

use axum::{
    extract::{MatchedPath, Request},
    http::Method,
};
use carrel_proto::problem::Problem;
use utoipa::openapi::{OpenApi, PathItem, RefOr, path::Operation, path::ParameterIn};

use super::problem::bad;

/// Methods and routes of the document that take no query.
#[derive(Debug)]
pub(crate) struct Questions(HashSet<(Method, String)>);

impl Questions {
    pub(crate) fn of(document: &OpenApi) -> Self {
        let takes_none = |operation: &Operation| {
            let mut all = operation.parameters.iter().flatten();
            all.all(|parameter| match parameter {
                RefOr::T(parameter) => parameter.parameter_in != ParameterIn::Query,
                // None of ours is written so; what is not known is not refused.
                RefOr::Ref(_) => false,
            })
        };
        let of_path = |(path, item): (&String, &PathItem)| {
            let operations = [
                (Method::GET, &item.get),
                (Method::PUT, &item.put),
                (Method::POST, &item.post),
                (Method::PATCH, &item.patch),
                (Method::DELETE, &item.delete),
            ];
            let none =
                operations.into_iter().filter(|(_, operation)| operation.as_ref().is_some_and(takes_none));
            none.map(|(method, _)| (method, path.clone())).collect::<Vec<_>>()
        };
        Self(document.paths.paths.iter().flat_map(of_path).collect())
    }

    pub(crate) fn check(&self, request: &Request) -> Result<(), Problem> {
        let Some(query) = request.uri().query().filter(|query| !query.is_empty()) else { return Ok(()) };
        let route = request.extensions().get::<MatchedPath>().map(|path| path.as_str().to_owned());
        let known = route.is_some_and(|route| self.0.contains(&(request.method().clone(), route)));
        if !known {
            return Ok(());
        }
        let name: String = query.split(['=', '&']).next().unwrap_or_default().chars().take(40).collect();
        Err(bad(format!("the query: unknown parameter `{name}`: this takes none"))
            .hint("/openapi.json describes every request"))
    }
}
